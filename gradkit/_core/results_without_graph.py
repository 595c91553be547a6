"""Results whose derivative is known without their graph: it is zero, or torch would get it wrong.

A gradient that does not depend on what it was computed from, that of a linear function, has no
graph; torch's engine, and the transforms of torch.func, cannot tell it from one that was detached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from gradkit._compat.autograd import node_type
from gradkit._compat.transforms import (
    differentiated,
    is_of_ended_transform,
    recording_levels,
    transforms,
)
from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import Subgraph
from gradkit.errors import UnsupportedGraphError

Grads: TypeAlias = list[Tensor | None]


def with_zero_derivatives(grads: Iterable[Tensor | None], sources: Iterable[Tensor]) -> Grads:
    """Return gradients with the graphs of all that they were computed from."""
    # Where one of them does not carry such a graph, its derivative there is zero.
    graphs = [(source, recording_levels(source)) for source in sources]
    every = set().union(*(levels for _, levels in graphs))
    carriers = [source for source, levels in graphs if levels]
    return [_with_graphs(grad, every, carriers) for grad in grads]


def _with_graphs(grad: Tensor | None, every: set[int], carriers: list[Tensor]) -> Tensor | None:
    # Sparse ones stay constants: torch has no derivative of most of their operations.
    if grad is None or grad.layout != torch.strided or recording_levels(grad) >= every:
        return grad
    return _attach(grad, carriers)


def with_refused_derivatives(
    grads: Iterable[Tensor | None], sources: Iterable[Tensor], reason: str
) -> Grads:
    """Return gradients whose derivative, outside of transforms, raises `UnsupportedGraphError`."""
    carriers = [source for source in sources if recording_levels(source)]
    return [None if grad is None else _attach(grad, carriers, reason) for grad in grads]


def without_ended_graph(grad: Tensor | None) -> Tensor | None:
    """Return a gradient without a graph that leads to tensors of ended transforms only."""
    # Since 2.14, torch.func leaves one to the second derivatives of batch_norm and instance_norm.
    if grad is None or not grad.requires_grad or transforms():
        return grad
    leaves = Subgraph([grad]).leaves.values()
    return grad.detach() if leaves and all(map(is_of_ended_transform, leaves)) else grad


def accumulate_grad_nodes(leaves: Sequence[Tensor]) -> list[Node]:
    """Return the AccumulateGrad nodes of leaves without subclasses, outside of transforms."""
    # A constant function of all leads to them: a view of each would take four times as long.
    with torch.enable_grad(), INSIDE:
        result = _attach(torch.empty(0), leaves)  # which keeps its node alive
    return [cast("Node", child) for child, _ in cast("Node", result.grad_fn).next_functions[1:]]


def _attach(tensor: Tensor, sources: Sequence[Tensor], reason: str | None = None) -> Tensor:
    return cast("Tensor", _Constant.apply(reason, tensor, *sources))  # type: ignore[no-untyped-call]


class _Constant(Function):
    """The identity of a tensor, and a constant function of others."""

    generate_vmap_rule = True

    @staticmethod
    def forward(reason: str | None, tensor: Tensor, *sources: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.reason, ctx.sources = inputs[0], len(inputs) - 2
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        _refuse(ctx.reason)
        return None, cotangent, *[None] * ctx.sources

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor | None, *tangents: Tensor | None) -> Tensor | None:
        _refuse(ctx.reason)
        return tangent


def _refuse(reason: str | None) -> None:
    # The rule for vmap runs this inside of one; a transform that differentiates has asked before.
    if reason is not None and not differentiated():
        raise UnsupportedGraphError(reason)


ZERO_DERIVATIVE_NODE: type = node_type(_Constant)
