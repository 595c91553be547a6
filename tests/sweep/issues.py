"""Where torch's wrong derivatives are reported: `python -m tests.sweep.issues` prints the table.

For each operation and kind of node of gradkit's table: the issues, which are in the table, or None
if a search of torch's tracker found none. Then there is a program to be reported in
`tests/sweep/reports/`, whose name `NOT_REPORTED` has.
"""

from __future__ import annotations

from gradkit._torch_bugs.special_functions import SPECIAL_FUNCTIONS
from gradkit._torch_bugs.table import NODES, OPERATIONS, ROWS

Links = tuple[str, ...]

# Of third derivatives, by the kind of node.
_OF_NODES = {
    "NativeBatchNormBackwardBackward0": "186256",
    "NativeLayerNormBackwardBackward0": "175754",
}
_REPORTED = _OF_NODES | {name: row.issues for row in ROWS for name in row.names.split()}


def _links(issues: str) -> Links:
    """Return links to torch's tracker: of a number there, or of functorch#number."""
    parts = (issue.rpartition("#") for issue in issues.split())
    return tuple(
        f"https://github.com/pytorch/{owner or 'pytorch'}/issues/{number}"
        for owner, _, number in parts
    )


_ALONE = (
    "as_strided_scatter", "block_diag", "cdist", "cholesky", "cosine_similarity", "eigh",
    "eigvalsh", "gaussian_nll_loss", "i1", "index_fill", "index_reduce", "linear_cross_entropy",
    "linspace", "lu_solve", "masked_select", "pdist", "polar", "pow", "prelu", "prod", "roll",
    "select_scatter", "softshrink", "sparse_coo_tensor", "svd", "vector_norm",
    "weight_norm",
)  # fmt: skip
# Polynomials, and Bessel functions of other forms.
_SPECIAL = {name for name in (*SPECIAL_FUNCTIONS, "airy_ai") if not _REPORTED[name]}
# What is not reported, and the name of the program that shows it.
NOT_REPORTED: dict[str, str] = {
    **{name: name for name in _ALONE},
    **dict.fromkeys(_SPECIAL, "special_functions"),
    "cholesky_ex": "cholesky",
    "float_power": "pow",
    "i0": "i1",
    **dict.fromkeys(("norm", "matrix_norm", "dist"), "vector_norm"),
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
ISSUES: dict[str, Links | None] = {
    **{name: _links(issues) for name, issues in _REPORTED.items() if issues},
    **dict.fromkeys(NOT_REPORTED),
}


def derivatives() -> dict[str, list[str]]:
    """Return what is wrong of each operation, and of which order through each kind of node."""
    found = {name: list(rows) for name, rows in (OPERATIONS | NODES).items()}
    for row in ROWS:
        for name in row.names.split():
            found[name] = list(dict.fromkeys([*found.get(name, []), *map(" ".join, row.also)]))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    print("| of | wrong | reported |", "|---|---|---|", sep="\n")
    for name, wrong in derivatives().items():
        links = ISSUES[name] or (f"not reported: {NOT_REPORTED[name]}.py",)
        print(f"| {name} | {', '.join(wrong)} | {' '.join(links)} |")
