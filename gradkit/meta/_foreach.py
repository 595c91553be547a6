"""Arithmetic on lists of tensors, with a factor for all of them or one for each.

torch's foreach kernels are the fastest for many small tensors, but vmap has no rule for them, and a
factor that is a tensor has to keep its gradient: then it is done tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms

Tensors: TypeAlias = list[Tensor]
# A hyper-parameter of the tensors in a list: a number, or one number or tensor for each of them.
Factor: TypeAlias = float | list[float | Tensor]


def per_tensor(factor: Factor, count: int) -> Sequence[float | Tensor]:
    """Return a factor for each of `count` tensors."""
    return factor if isinstance(factor, list) else [factor] * count


def _can_use_foreach(*factors: Factor) -> bool:
    return not transforms() and not any(isinstance(factor, list) for factor in factors)


def scale(xs: Tensors, factor: Factor) -> Tensors:
    """Return x * factor."""
    if _can_use_foreach(factor):
        return list(torch._foreach_mul(xs, factor))  # type: ignore[arg-type]
    return [x * f for x, f in zip(xs, per_tensor(factor, len(xs)), strict=True)]


def add(xs: Tensors, ys: Tensors, alpha: Factor = 1.0) -> Tensors:
    """Return x + alpha * y."""
    if isinstance(alpha, list):
        return [x + f * y for x, y, f in zip(xs, ys, alpha, strict=True)]
    # With a graph, the foreach kernel would keep every y for its backward pass.
    if transforms() or any(x.requires_grad for x in (*xs, *ys)):
        return [torch.add(x, y, alpha=alpha) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_add(xs, ys, alpha=alpha))


def mul(xs: Tensors, ys: Tensors) -> Tensors:
    """Return x * y."""
    if _can_use_foreach():
        return list(torch._foreach_mul(xs, ys))
    return [x * y for x, y in zip(xs, ys, strict=True)]


def div(xs: Tensors, ys: Tensors) -> Tensors:
    """Return x / y."""
    if _can_use_foreach():
        return list(torch._foreach_div(xs, ys))
    return [x / y for x, y in zip(xs, ys, strict=True)]


def add_scalar(xs: Tensors, scalar: Factor) -> Tensors:
    """Return x + scalar."""
    if _can_use_foreach(scalar):
        return list(torch._foreach_add(xs, scalar))  # type: ignore[arg-type]
    return [x + s for x, s in zip(xs, per_tensor(scalar, len(xs)), strict=True)]


def moving_average(xs: Tensors, ys: Tensors, decay: Factor) -> Tensors:
    """Return decay * x + (1 - decay) * y."""
    return add(scale(xs, decay), ys, one_minus(decay))


def sqrt(xs: Tensors) -> Tensors:
    """Return the square root, whose derivative at 0 is taken as 0."""
    if _can_use_foreach() and not any(x.requires_grad for x in xs):
        return list(torch._foreach_sqrt(xs))
    return [safe_sqrt(x) for x in xs]


def safe_sqrt(x: Tensor) -> Tensor:
    """Return the square root of a tensor, whose derivative at 0 is taken as 0."""
    is_zero = x == 0
    # The ones keep an infinite derivative out of the graph: 0 * inf is nan.
    return torch.where(is_zero, torch.zeros_like(x), torch.where(is_zero, 1.0, x).sqrt())


def one_minus(factor: Factor) -> Factor:
    """Return 1 - factor."""
    return [1 - f for f in factor] if isinstance(factor, list) else 1 - factor


def product(a: Factor, b: Factor) -> Factor:
    """Return a * b."""
    if not isinstance(a, list) and not isinstance(b, list):
        return a * b
    count = len(a) if isinstance(a, list) else len(b) if isinstance(b, list) else 0
    return [x * y for x, y in zip(per_tensor(a, count), per_tensor(b, count), strict=True)]


def power(factor: Factor, exponent: float) -> Factor:
    """Return factor ** exponent."""
    return [f**exponent for f in factor] if isinstance(factor, list) else factor**exponent


def is_zero(factor: Factor) -> bool:
    """Return whether a factor is the number 0; never for a tensor, which may have a gradient."""
    return not isinstance(factor, list) and factor == 0
