"""Solvers of linear systems that are known by their products alone, on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from gradkit import tree

# Multiplies a vector, given as a list of tensors, by the matrix.
Product: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


def conjugate_gradients(
    product: Product, v: list[Tensor], maxiter: int, tol: float
) -> list[Tensor]:
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


def neumann(product: Product, v: list[Tensor], maxiter: int, tol: float) -> list[Tensor]:
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


def _largest_eigenvalue(product: Product, v: list[Tensor], rounds: int = 20) -> Tensor:
    """Estimate the largest eigenvalue by power iteration, from above."""
    value = tree.global_norm(v)
    for _ in range(rounds):
        v = product(tree.scale(v, 1 / tree.global_norm(v)))
        value = tree.global_norm(v)
    return value * 1.1
