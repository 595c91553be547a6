"""Derivatives that torch computes wrongly, as a sweep over its operations has found them."""

from __future__ import annotations


def by_name(table: dict[str, dict[str, str]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each name the releases in which it is wrong, by the transforms or the order."""
    rows: dict[str, dict[str, tuple[str, ...]]] = {}
    for releases, each in table.items():
        for key, names in each.items():
            for name in names.split():
                rows.setdefault(name, {})[key] = tuple(releases.split())
    return {name: dict(sorted(row.items())) for name, row in sorted(rows.items())}


# By releases of torch, and by the transforms around it from the outermost: operations. "Grad Jvp"
# is the derivative of a jvp; in "Grad +Vmap" the backward pass alone is batched. Then by the order
# of a derivative that `create_graph=True` gives: the kinds of nodes through which it is wrong.
# Written by `python -m tests.sweep --write`: changes by hand are lost.
SWEPT = ("2.11", "2.12", "2.13", "2.14", "2.15")
OPERATIONS = by_name({
    "2.11 2.12 2.13 2.14": {
        "Grad Grad Grad": "det",
        "Grad Jvp": "det logdet slogdet solve solve_ex tensorsolve",
        "Grad Jvp Grad": "eig eigvals",
        "Grad Jvp Jvp": "eig eigvals",
        "Jvp Grad Grad": "det",
        "Jvp Jvp": "det logdet slogdet solve solve_ex tensorsolve",
        "Jvp Jvp Grad": "eig eigvals",
        "Jvp Jvp Jvp": "eig eigvals",
    },
    "2.11 2.12 2.13 2.14 2.15": {
        "Grad": "as_strided_scatter",
        "Grad +Vmap": "cdist masked_select roll",
        "Grad Grad": "logcumsumexp sparse_coo_tensor weight_norm",
        "Grad Grad +Vmap": "batch_norm instance_norm layer_norm",
        "Grad Grad Grad": "batch_norm instance_norm layer_norm",
        "Grad Jvp": "batch_norm cumprod householder_product instance_norm layer_norm "
        "sparse_coo_tensor weight_norm",
        "Grad Jvp Grad": "prod",
        "Grad Jvp Jvp": "prod",
        "Grad Vmap": "select_scatter",
        "Grad Vmap Grad": "batch_norm instance_norm layer_norm",
        "Jvp": "cholesky cholesky_ex cholesky_inverse eigh embedding scatter_reduce "
        "triangular_solve",
        "Jvp Grad": "eigvalsh logcumsumexp sparse_coo_tensor weight_norm",
        "Jvp Grad Grad": "batch_norm instance_norm layer_norm",
        "Jvp Jvp": "batch_norm cumprod eigvalsh householder_product instance_norm layer_norm "
        "sparse_coo_tensor weight_norm",
        "Jvp Jvp Grad": "prod",
        "Jvp Jvp Jvp": "prod",
        "Jvp Vmap Grad": "batch_norm instance_norm layer_norm",
        "Vmap": "index_fill roll",
        "Vmap Vmap": "lu_solve",
        "Vmap Vmap Grad": "prelu",
    },
    "2.13 2.14 2.15": {"Grad": "linear_cross_entropy", "Jvp": "linear_cross_entropy"},
})
NODES = by_name({
    "2.11 2.12 2.13": {"3": "NativeBatchNormBackwardBackward0"},
    "2.11 2.12 2.13 2.14 2.15": {
        "2": "CondAutogradOpBackward LogcumsumexpBackward0 ScanAutogradOpBackward "
        "SparseCooTensorWithDimsAndTensorsBackward0 WeightNormInterfaceBackward0 "
        "WhileLoopAutogradOpBackward",
        "3": "NativeLayerNormBackwardBackward0",
    },
    "2.13 2.14 2.15": {
        "2": "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward"
    },
})
