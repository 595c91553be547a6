"""The optimality condition at a minimum, and the gradient through it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit import tree
from gradkit._autograd.inner_pass import inner_grads, inner_grads_or_zeros
from gradkit._checks.derivatives import refuse_wrong_derivative
from gradkit._core.graph import Subgraph
from gradkit._core.losses import read_losses
from gradkit._core.warn import level_of_the_caller
from gradkit._state.recompute import RecomputeState
from gradkit.errors import GradkitWarning, UnreachedParamError, UnsupportedGraphError, message
from gradkit.meta._linear_solvers import Product

LinearSolver: TypeAlias = Callable[[Product, list[Tensor]], list[Tensor]]


class OptimalityCondition:
    """d inner_loss / d params = 0, where the loss is a function of two lists of tensors."""

    def __init__(
        self,
        inner_loss: Callable[[list[Tensor], list[Tensor]], Tensor],
        linear_solver: LinearSolver,
        tol: float,
        damping: float,
    ) -> None:
        self._inner_loss = inner_loss
        self._linear_solver = linear_solver
        self._tol = tol
        self._damping = damping
        self._state: RecomputeState

    def attach(self, minimum: list[Tensor], outer: list[Tensor]) -> list[Tensor]:
        """Return the minimum, depending on the outer variables."""
        if not torch.is_grad_enabled():
            return minimum
        self._state = RecomputeState([*minimum, *outer])
        with torch.enable_grad(), self._state.first_run():
            at, by = _as_leaves(minimum), _as_leaves(outer)
            loss = self._loss(at, by)
        _check_graph(loss, at, by)
        self._state.record_outputs([loss])
        if not any(x.requires_grad for x in outer):
            return minimum
        return list(_AtMinimum.apply(self, len(minimum), *minimum, *outer))  # type: ignore[no-untyped-call]

    def _loss(self, at: list[Tensor], by: list[Tensor]) -> Tensor:
        (loss,) = read_losses((self._inner_loss(at, by),), scalar=True).leaves
        if not loss.requires_grad:
            raise UnreachedParamError(_constant_loss())
        return loss

    def outer_grads(
        self,
        minimum: Sequence[Tensor],
        outer: Sequence[Tensor],
        needed: Sequence[bool],
        cotangents: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Return the gradients with respect to the outer tensors, from those at the minimum."""
        with torch.enable_grad(), self._state.second_run():
            at = _as_leaves(minimum)
            by = [x.detach().requires_grad_(need) for x, need in zip(outer, needed, strict=True)]
            loss = self._loss(at, by)
            self._state.check_outputs([loss], "inner_loss")
            slope = inner_grads_or_zeros([loss], at, create_graph=True)

        def product(u: list[Tensor]) -> list[Tensor]:
            hu = inner_grads_or_zeros(slope, at, u, retain_graph=True)
            return tree.add(hu, tree.scale(u, self._damping)) if self._damping else hu

        u = self._linear_solver(product, list(cotangents))
        self._warn_if_inexact(product, u, cotangents)
        indices = [index for index, need in enumerate(needed) if need]
        reached = inner_grads(slope, [by[index] for index in indices], [-x for x in u])
        grads: list[Tensor | None] = [None] * len(outer)
        for index, grad in zip(indices, reached, strict=True):
            grads[index] = grad
        return grads

    def _warn_if_inexact(
        self, product: Product, u: list[Tensor], cotangents: Sequence[Tensor]
    ) -> None:
        v = list(cotangents)
        size = tree.global_norm(v)
        left = tree.global_norm(tree.sub(v, product(u)))
        residual = float(left / size) if size > 0 else 0.0
        enough = max(self._tol, 100 * torch.finfo(size.dtype).eps)
        if not residual <= enough:
            warnings.warn(
                "gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self._tol:g}: the gradient is as inexact. Raise "
                "maxiter, add damping, or use another solve.",
                GradkitWarning,
                stacklevel=level_of_the_caller(),
            )


def _as_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves with the values of tensors; integers stay constants."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]


def _check_graph(loss: Tensor, at: list[Tensor], by: list[Tensor]) -> None:
    below = Subgraph([loss])
    refuse_wrong_derivative("inner_loss", at, below)
    reached = below.leaves.keys()
    if reached.isdisjoint(map(id, at)):
        raise UnreachedParamError(_constant_loss())
    if reached - set(map(id, [*at, *by])):
        raise UnsupportedGraphError(
            message(
                "inner_loss",
                "a function of its arguments",
                "one that uses a tensor from outside that requires grad: its gradient would be "
                "lost",
                'pass it in outer, not inside a module: find(params, {"name": tensor})',
            )
        )


def _constant_loss() -> str:
    return message(
        "inner_loss",
        "a loss that depends on params",
        "one that does not depend on them",
        "compute it from inner_loss's own arguments",
    )


class _AtMinimum(torch.autograd.Function):
    """The identity on the minimum, whose backward pass solves the linear system."""

    @staticmethod
    def forward(
        ctx: Any, condition: OptimalityCondition, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.condition, ctx.count = condition, count
        ctx.save_for_backward(*tensors)  # raises if one of them is changed in place
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedGraphError(
                message(
                    "create_graph",
                    "a first derivative of an implicit gradient",
                    "one that is to be differentiated again",
                    "leave out create_graph=True, or use unroll",
                )
            )
        minimum, outer = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[2 + ctx.count :]
        grads = ctx.condition.outer_grads(minimum, outer, needed, cotangents)
        return (None, None, *[None] * ctx.count, *grads)
