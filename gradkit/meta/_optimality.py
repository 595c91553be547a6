"""The optimality condition at a minimum, and the gradient through it by a linear solve."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit import tree
from gradkit._autograd.inner_pass import inner_grads, inner_grads_or_zeros
from gradkit._checks.derivatives import refuse_wrong_derivative
from gradkit._core.graph import Subgraph
from gradkit._core.warn import level_of_the_caller
from gradkit._state.recompute_state import RecomputeState
from gradkit.errors import GradkitWarning, UnreachedParamError, UnsupportedGraphError, message
from gradkit.meta._foreach import Tensors
from gradkit.meta._trees import read_loss

# Multiplies a vector, given as a list of tensors, by the matrix.
Product: TypeAlias = Callable[[Tensors], Tensors]
LinearSolver: TypeAlias = Callable[[Product, Tensors], Tensors]


@dataclass
class OptimalityCondition:
    """d inner_loss / d params = 0, where the loss is a function of two lists of tensors."""

    inner_loss: Callable[[Tensors, Tensors], Tensor]
    linear_solver: LinearSolver
    tol: float
    damping: float
    _state: RecomputeState = field(init=False)

    def attach(self, minimum: Tensors, outer: Tensors) -> Tensors:
        """Return the minimum, depending on the outer variables."""
        if not torch.is_grad_enabled():
            return minimum
        self._state = RecomputeState([*minimum, *outer])
        with torch.enable_grad(), self._state.first_run():
            at, by = _as_leaves(minimum), _as_leaves(outer)
            loss = self._loss(at, by)
        self._state.record_outputs([loss])
        if not any(x.requires_grad for x in outer):
            return minimum
        return list(_AtMinimum.apply(self, len(minimum), *minimum, *outer))  # type: ignore[no-untyped-call]

    def _loss(self, at: Tensors, by: Tensors) -> Tensor:
        loss, _ = read_loss(self.inner_loss(at, by), "inner_loss")
        _check_graph(loss, at, by)
        return loss

    def outer_grads(
        self, at: Tensors, outer: Tensors, needed: Sequence[bool], cotangents: Tensors
    ) -> list[Tensor | None]:
        """Return the gradients with respect to the outer tensors, from those at the minimum."""
        with torch.enable_grad(), self._state.second_run():
            at = _as_leaves(at)
            by = [x.detach().requires_grad_(need) for x, need in zip(outer, needed, strict=True)]
            loss = self._loss(at, by)
            self._state.check_outputs([loss], "inner_loss")
            slope = inner_grads_or_zeros([loss], at, create_graph=True)

        def product(u: Tensors) -> Tensors:
            hu = inner_grads_or_zeros(slope, at, u, retain_graph=True)
            return tree.add(hu, tree.scale(u, self.damping)) if self.damping else hu

        u = self.linear_solver(product, cotangents)
        self._warn_if_inexact(tree.sub(cotangents, product(u)), cotangents)
        reached = iter(inner_grads(slope, list(compress(by, needed)), [-x for x in u]))
        return [next(reached) if need else None for need in needed]

    def _warn_if_inexact(self, left: Tensors, v: Tensors) -> None:
        size = tree.global_norm(v)
        residual = float(tree.global_norm(left) / size) if size > 0 else 0.0
        enough = max(self.tol, 100 * torch.finfo(size.dtype).eps)
        if not residual <= enough:
            warnings.warn(
                "gradkit.meta.implicit: the linear solve came to a relative residual of "
                f"{residual:.2e}, not to tol={self.tol:g}: the gradient is as inexact. Raise "
                "maxiter, add damping, or use another solve.",
                GradkitWarning,
                stacklevel=level_of_the_caller(),
            )


def _as_leaves(tensors: Sequence[Tensor]) -> Tensors:
    """Return leaves with the values of tensors; integers stay constants."""
    return [x.detach().requires_grad_(x.is_floating_point() or x.is_complex()) for x in tensors]


def _check_graph(loss: Tensor, at: Tensors, by: Tensors) -> None:
    below = Subgraph([loss] if loss.requires_grad else [])
    refuse_wrong_derivative("inner_loss", at, below)
    reached = below.leaves.keys()
    if reached.isdisjoint(map(id, at)):
        expected, got = "a loss that depends on params", "one that does not depend on them"
        fix = "compute it from inner_loss's own arguments"
        raise UnreachedParamError(message("inner_loss", expected, got, fix))
    if reached - set(map(id, [*at, *by])):
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix = 'pass it in outer, not inside a module: find(params, {"name": tensor})'
        raise UnsupportedGraphError(message("inner_loss", "a function of its arguments", got, fix))


class _AtMinimum(torch.autograd.Function):
    """The identity on the minimum, whose backward pass solves the linear system."""

    @staticmethod
    def forward(ctx: Any, condition: OptimalityCondition, count: int, *tensors: Tensor) -> Any:
        ctx.condition, ctx.count = condition, count
        ctx.save_for_backward(*tensors)  # raises if one of them is changed in place
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            expected = "a first derivative of an implicit gradient"
            got = "one that is to be differentiated again"
            fix = "leave out create_graph=True, or use unroll"
            raise UnsupportedGraphError(message("create_graph", expected, got, fix))
        minimum, outer = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needed = ctx.needs_input_grad[2 + ctx.count :]
        grads = ctx.condition.outer_grads(minimum, outer, needed, list(cotangents))
        return (None, None, *[None] * ctx.count, *grads)


def conjugate_gradients(product: Product, v: Tensors, maxiter: int, tol: float) -> Tensors:
    """Solve a positive definite system: Hestenes and Stiefel 1952, section 3."""
    x, r = tree.scale(v, 0.0), v
    p, rr = r, tree.dot(r, r)
    enough = tol**2 * rr
    for _ in range(maxiter):
        if rr <= enough:
            break
        hp = product(p)
        step = rr / tree.dot(p, hp)
        x = tree.add(x, tree.scale(p, step))
        r = tree.sub(r, tree.scale(hp, step))
        rr, before = tree.dot(r, r), rr
        p = tree.add(r, tree.scale(p, rr / before))
    return list(x)


def neumann(product: Product, v: Tensors, maxiter: int, tol: float) -> Tensors:
    """Sum (1 - a H)^k a v, where a is one over the largest eigenvalue."""
    step = 1 / _largest_eigenvalue(product, v)
    x, r = tree.scale(v, 0.0), v
    enough = tol * tree.global_norm(v)
    for _ in range(maxiter):
        if tree.global_norm(r) <= enough:
            break
        x = tree.add(x, tree.scale(r, step))
        r = tree.sub(v, product(x))
    return list(x)


def _largest_eigenvalue(product: Product, v: Tensors, rounds: int = 20) -> Tensor:
    """Estimate the largest eigenvalue by power iteration, from above."""
    value = tree.global_norm(v)
    for _ in range(rounds):
        v = product(tree.scale(v, 1 / tree.global_norm(v)))
        value = tree.global_norm(v)
    return value * 1.1
