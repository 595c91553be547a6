"""Arithmetic on lists of tensors, with a factor for all of them or one for each.

torch's foreach kernels are the fastest for many small tensors, but vmap has no rule for them, and a
factor that is a tensor has to keep its gradient: then it is done tensor by tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms

Tensors: TypeAlias = list[Tensor]
# A hyper-parameter of the tensors in a list: a number, or one number or tensor for each of them.
Factor: TypeAlias = float | list[float | Tensor]


def per_tensor(factor: Factor, count: int) -> Sequence[float | Tensor]:
    """Return a factor for each of `count` tensors."""
    return factor if isinstance(factor, list) else [factor] * count


def scale(xs: Tensors, factor: Factor) -> Tensors:
    """Return x * factor."""
    return _with_factor(torch._foreach_mul, operator.mul, xs, factor)


def add_scalar(xs: Tensors, scalar: Factor) -> Tensors:
    """Return x + scalar."""
    return _with_factor(torch._foreach_add, operator.add, xs, scalar)


def _with_factor(kernel: Any, op: Callable[..., Tensor], xs: Tensors, factor: Factor) -> Tensors:
    if isinstance(factor, list) or transforms():
        return list(map(op, xs, per_tensor(factor, len(xs))))
    return list(kernel(xs, factor))


def mul(xs: Tensors, ys: Tensors) -> Tensors:
    """Return x * y."""
    return list(map(operator.mul, xs, ys)) if transforms() else list(torch._foreach_mul(xs, ys))


def div(xs: Tensors, ys: Tensors) -> Tensors:
    """Return x / y."""
    return list(map(operator.truediv, xs, ys)) if transforms() else list(torch._foreach_div(xs, ys))


def add(xs: Tensors, ys: Tensors, alpha: Factor = 1.0) -> Tensors:
    """Return x + alpha * y."""
    if isinstance(alpha, list):
        return [_add_scaled(x, y, f) for x, y, f in zip(xs, ys, alpha, strict=True)]
    # With a graph, the foreach kernel would keep every y for its backward pass.
    if transforms() or any(x.requires_grad for x in (*xs, *ys)):
        return [torch.add(x, y, alpha=alpha) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_add(xs, ys, alpha=alpha))


def _add_scaled(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


def moving_average(xs: Tensors, ys: Tensors, decay: Factor) -> Tensors:
    """Return decay * x + (1 - decay) * y."""
    return add(scale(xs, decay), ys, one_minus(decay))


def sqrt(xs: Tensors) -> Tensors:
    """Return the square root, whose derivative at 0 is taken as 0."""
    if transforms() or any(x.requires_grad for x in xs):
        return [safe_sqrt(x) for x in xs]
    return list(torch._foreach_sqrt(xs))


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
    return list(map(operator.mul, per_tensor(a, count), per_tensor(b, count)))


def power(factor: Factor, exponent: float) -> Factor:
    """Return factor ** exponent."""
    return [f**exponent for f in factor] if isinstance(factor, list) else factor**exponent


def is_zero(factor: Factor) -> bool:
    """Return whether a factor is the number 0; never for a tensor, which may have a gradient."""
    return not isinstance(factor, list) and factor == 0


def ascent_as_descent(grads: Tensors, hyper: Mapping[str, Any]) -> Tensors:
    """Return the gradients, negated with `maximize`."""
    return scale(grads, -1.0) if hyper["maximize"] else grads


def with_weight_decay(params: Tensors, grads: Tensors, hyper: Mapping[str, Any]) -> Tensors:
    """Return the gradients to descend, with the weight decay added."""
    grads, decay = ascent_as_descent(grads, hyper), hyper["weight_decay"]
    return grads if is_zero(decay) else add(grads, params, decay)


def descend(params: Tensors, direction: Tensors, lr: Factor) -> Tensors:
    """Return params - lr * direction."""
    return add(params, direction, product(lr, -1.0))
