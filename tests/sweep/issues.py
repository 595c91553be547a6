"""Where torch's wrong derivatives are reported: `python -m tests.sweep.issues` prints the table.

For each operation and kind of node of gradkit's table: the issues, as read on torch's tracker, or
None if a search found none. Then there is a program to be reported in `tests/sweep/reports/`, whose
name `NOT_REPORTED` has.
"""

from __future__ import annotations

from gradkit._checks.special_functions import SPECIAL_FUNCTIONS
from gradkit._checks.transform_bugs import AT_SOME_VALUES, NOT_SWEPT
from gradkit._checks.wrong_derivatives_table import NODES, OPERATIONS

Links = tuple[str, ...]


def _torch(*numbers: int) -> Links:
    return tuple(f"https://github.com/pytorch/pytorch/issues/{number}" for number in numbers)


_BATCHING_RULE = ("https://github.com/pytorch/functorch/issues/534",)
_BESSEL = ("https://github.com/pytorch/pytorch/pull/189872",)
# torch's own list: https://github.com/pytorch/pytorch/issues/198017.
_REPORTED: dict[str, Links] = {
    "batch_norm": _torch(196699, 186256) + _BATCHING_RULE,
    "binary_cross_entropy": _torch(103316),
    "cholesky_inverse": _torch(196682),
    "cumprod": _torch(196701),
    "det": _torch(192540, 192521, 196696, 104675, 80761),
    "embedding": _torch(93950),  # closed: the difference of the modes is documented since
    "hardshrink": _torch(80803),
    "householder_product": _torch(196698),
    "layer_norm": _torch(196700, 175754) + _BATCHING_RULE,
    "logcumsumexp": _torch(196705),  # its jvp
    "logdet": _torch(192540),
    "normal": _torch(4620),  # closed
    "scatter_reduce": _torch(196702),  # of products; the ties are those of index_reduce
    "sinc": _torch(196703, 89459),
    "slogdet": _torch(192540, 196697),
    "triangular_solve": _torch(196707),
    # They call cumprod, batch_norm and solve, also in their rules.
    "vander": _torch(196701),
    "instance_norm": _torch(196699, 186256) + _BATCHING_RULE,
    **dict.fromkeys(("solve", "solve_ex", "tensorsolve"), _torch(192540, 196695)),
    **dict.fromkeys(("eig", "eigvals"), _torch(192540)),
    **dict.fromkeys((f"bessel_{kind}" for kind in ("j0", "j1", "y0", "y1")), _BESSEL),
    **dict.fromkeys((f"modified_bessel_{kind}" for kind in ("i0", "i1", "k0", "k1")), _BESSEL),
    "NativeBatchNormBackwardBackward0": _torch(186256),
    "NativeLayerNormBackwardBackward0": _torch(175754),
}
_ALONE = (
    "as_strided_scatter", "block_diag", "cdist", "cholesky", "cosine_similarity", "eigh",
    "eigvalsh", "gaussian_nll_loss", "index_fill", "index_reduce", "linear_cross_entropy",
    "linspace", "lu_solve", "masked_select", "polar", "pow", "prelu", "prod", "roll",
    "select_scatter", "softshrink", "sparse_coo_tensor", "weight_norm",
)  # fmt: skip
# Polynomials, and Bessel functions of other forms.
_SPECIAL = {*SPECIAL_FUNCTIONS, "airy_ai"} - _REPORTED.keys()
# What is not reported, and the name of the program that shows it.
NOT_REPORTED: dict[str, str] = {
    **{name: name for name in _ALONE},
    **dict.fromkeys(_SPECIAL, "special_functions"),
    "cholesky_ex": "cholesky",
    "float_power": "pow",
    "logspace": "linspace",
    "CondAutogradOpBackward": "cond",
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": (
        "linear_cross_entropy"
    ),
    "LogcumsumexpBackward0": "logcumsumexp",  # whose second derivative is wrong, too
    "ScanAutogradOpBackward": "scan",
    "SparseCooTensorWithDimsAndTensorsBackward0": "sparse_coo_tensor",
    "WeightNormInterfaceBackward0": "weight_norm",
    "WhileLoopAutogradOpBackward": "while_loop",
}
ISSUES: dict[str, Links | None] = {**_REPORTED, **dict.fromkeys(NOT_REPORTED)}


def derivatives() -> dict[str, list[str]]:
    """Return what is wrong of each operation, and of which order through each kind of node."""
    found = {name: list(rows) for name, rows in (OPERATIONS | NODES).items()}
    for rows in (NOT_SWEPT, AT_SOME_VALUES):
        for name, stacks in rows.items():
            found[name] = list(dict.fromkeys([*found.get(name, []), *map(" ".join, stacks)]))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print("| of | wrong | reported |", "|---|---|---|", sep="\n")
    for name, wrong in derivatives().items():
        links = ISSUES[name] or (f"not reported: {NOT_REPORTED[name]}.py",)
        print(f"| {name} | {', '.join(wrong)} | {' '.join(links)} |")
