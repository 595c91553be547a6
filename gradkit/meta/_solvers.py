"""Solvers of linear systems that are known by their products alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from gradkit import tree
from gradkit._core.pytree import PyTree

# A linear map, and a right-hand side; the solution.
Solve: TypeAlias = Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]


def linear_solver(solve: str | Solve, maxiter: int, tol: float) -> Solve:
    """Return the caller's own solver, or the one that goes by a name: "cg", or "neumann"."""
    if not isinstance(solve, str):
        return solve
    if solve == "cg":
        return lambda product, v: _conjugate_gradients(product, v, maxiter, tol)
    return lambda product, v: _neumann(product, v, maxiter, tol)


def _conjugate_gradients(
    product: Callable[[PyTree], PyTree], v: PyTree, maxiter: int, tol: float
) -> PyTree:
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
    return x


def _neumann(product: Callable[[PyTree], PyTree], v: PyTree, maxiter: int, tol: float) -> PyTree:
    """Sum (1 - a H)^k a v, where a is one over the largest eigenvalue."""
    step = 1 / _largest_eigenvalue(product, v)
    x, r = tree.scale(v, 0.0), v
    enough = tol * tree.global_norm(v)
    for _ in range(maxiter):
        if tree.global_norm(r) <= enough:
            break
        x = tree.add(x, tree.scale(r, step))
        r = tree.sub(v, product(x))
    return x


def _largest_eigenvalue(product: Callable[[PyTree], PyTree], v: PyTree, rounds: int = 20) -> Tensor:
    """Estimate it by power iteration, from above."""
    value = tree.global_norm(v)
    for _ in range(rounds):
        v = tree.scale(v, 1 / tree.global_norm(v))
        v = product(v)
        value = tree.global_norm(v)
    return value * 1.1
