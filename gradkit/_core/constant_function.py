"""A function that is constant in some tensors, and leads to their graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from gradkit._compat.autograd import node_type
from gradkit._compat.transforms import differentiated
from gradkit._compat.undoing import INSIDE
from gradkit.errors import UnsupportedGraphError


def attach(tensor: Tensor, sources: Sequence[Tensor], reason: str | None = None) -> Tensor:
    """Return a tensor that is constant in others; with a reason, its derivative raises that."""
    return cast("Tensor", _Constant.apply(reason, tensor, *sources))  # type: ignore[no-untyped-call]


def accumulate_grad_nodes(leaves: Sequence[Tensor]) -> list[Node]:
    """Return the AccumulateGrad nodes of leaves without subclasses, outside of transforms."""
    # A constant function of all leads to them: a view of each would take four times as long.
    with torch.enable_grad(), INSIDE:
        result = attach(torch.empty(0), leaves)  # which keeps its node alive
    return [cast("Node", child) for child, _ in cast("Node", result.grad_fn).next_functions[1:]]


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
