"""The calls of operations with known bugs that the nodes of a graph tell of, whoever made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.nodes import output_shape, saved, saved_or

Read: TypeAlias = Callable[[Any], dict[str, Any]]


def ops_of(nodes: Iterable[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each such operation, and those of its arguments that the bug depends on."""
    for node in nodes:
        operation = _OPERATIONS.get(type(node).__name__)
        if operation is not None:
            name, read = operation
            yield _name_of_norm(node) if read is _batch_norm else name, read(node)


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _result(node: Any) -> Tensor:
    """Return a tensor of the shape of the result, without data."""
    return torch.empty(output_shape(node, 0), device="meta")


def _batch_norm(node: Any) -> dict[str, Any]:
    training = saved_or(True, node, "training")  # cuDNN's is that of training alone
    return {"weight": saved(node, "weight"), "training": training, "use_input_stats": training}


def _name_of_norm(node: Any) -> str:
    # instance_norm is a batch_norm of one sample that has all channels of all samples.
    return "instance_norm" if output_shape(node, 0)[0] == 1 else "batch_norm"


_OPERATIONS: dict[str, tuple[str, Read]] = {
    "CdistBackward0": ("cdist", _nothing),
    "RollBackward0": ("roll", lambda node: {"input": _result(node)}),
    "MaskedSelectBackward0": (
        "masked_select",
        lambda node: {"input": saved(node, "self"), "mask": saved(node, "mask")},
    ),
    "IndexFillBackward1": ("index_fill", lambda node: {"value": _result(node)}),
    "SelectScatterBackward0": ("select_scatter", _nothing),
    "LinalgDetBackward0": ("det", _nothing),
    "LinalgSlogdetBackward0": ("slogdet", _nothing),
    "CholeskyInverseBackward0": ("cholesky_inverse", _nothing),
    "TriangularSolveBackward0": ("triangular_solve", _nothing),
    "ScatterReduceBackward0": ("scatter_reduce", lambda node: {"reduce": saved(node, "reduce")}),
    "NativeLayerNormBackward0": ("layer_norm", lambda node: {"weight": saved(node, "weight")}),
    "NativeBatchNormBackward0": ("batch_norm", _batch_norm),
    "CudnnBatchNormBackward0": ("batch_norm", _batch_norm),
    "MiopenBatchNormBackward0": ("batch_norm", _batch_norm),
}
