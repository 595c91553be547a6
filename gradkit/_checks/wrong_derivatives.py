"""Derivatives that torch computes wrongly. Written by `python -m tests.sweep --write`.

By operation: the transforms around it, from the outermost, and the releases of torch where that is
wrong. "Grad Jvp" is the derivative of a jvp; in "Grad +Vmap" the backward pass alone is batched. By
kind of node: which derivative by `create_graph=True` is wrong through it.
"""

from __future__ import annotations

SWEPT: tuple[str, ...] = ("2.11", "2.12", "2.13", "2.14", "2.15")

OPERATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "as_strided_scatter": {"Grad": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "batch_norm": {
        "Grad Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "cdist": {"Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "cholesky": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "cholesky_ex": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "cholesky_inverse": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "cumprod": {"Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "det": {
        "Grad Grad Grad": ("2.11", "2.12", "2.13", "2.14"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Grad Grad": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "eig": {
        "Grad Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp Grad": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "eigh": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "eigvals": {
        "Jvp Jvp Grad": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "eigvalsh": {
        "Jvp Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "householder_product": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "index_fill": {"Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "instance_norm": {
        "Grad Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "layer_norm": {
        "Grad Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "linear_cross_entropy": {"Grad": ("2.13", "2.14", "2.15"), "Jvp": ("2.13", "2.14", "2.15")},
    "logdet": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "lu_solve": {"Vmap Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "masked_select": {"Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "prelu": {"Vmap Vmap Grad": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "prod": {
        "Jvp Jvp Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "roll": {
        "Grad +Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "scatter_reduce": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "select_scatter": {"Grad Vmap": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "slogdet": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "solve": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "solve_ex": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "sparse_coo_tensor": {
        "Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
    "tensorsolve": {
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14"),
    },
    "triangular_solve": {"Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "weight_norm": {
        "Grad Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Grad Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Grad": ("2.11", "2.12", "2.13", "2.14", "2.15"),
        "Jvp Jvp": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    },
}

NODES: dict[str, dict[str, tuple[str, ...]]] = {
    "CondAutogradOpBackward": {"2": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": {
        "2": ("2.13", "2.14", "2.15")
    },
    "NativeBatchNormBackwardBackward0": {"3": ("2.11", "2.12", "2.13")},
    "NativeLayerNormBackwardBackward0": {"3": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "ScanAutogradOpBackward": {"2": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "SparseCooTensorWithDimsAndTensorsBackward0": {"2": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "WeightNormInterfaceBackward0": {"2": ("2.11", "2.12", "2.13", "2.14", "2.15")},
    "WhileLoopAutogradOpBackward": {"2": ("2.11", "2.12", "2.13", "2.14", "2.15")},
}
