"""Formulas that are right at the edges of operations, where torch's rules take a shortcut.

An exponent or a radius of zero, a probability near zero or one, a norm or a variance below an eps,
a threshold of zero. Elsewhere, where the host can tell, the operation itself runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradkit._checks.smooth_formulas import cumprod, order_of, with_value
from gradkit._compat.transforms import BATCH, transforms

Operation = Callable[..., Any]


def _nowhere(mask: Tensor) -> bool:
    """Return whether a condition is known to hold nowhere; only what is on the host is read."""
    if torch.compiler.is_compiling() or BATCH in transforms() or mask.device.type != "cpu":
        return False
    return not mask.any()


def is_zeroth_power(base: Tensor, exponent: Tensor) -> Tensor:
    """Return where an exponent is zero, and a base has a logarithm."""
    return (exponent == 0) & ((base != 0) if base.is_complex() else (base > 0))


def pow(operation: Operation, input: Any, exponent: Any, **kwargs: Any) -> Tensor:
    """Return a power; where the exponent is zero, torch takes the slope for a constant."""
    value: Tensor = operation(input, exponent, **kwargs)
    if not (isinstance(input, Tensor) and isinstance(exponent, Tensor) and _varies(exponent)):
        return value
    x, y = input.to(value.dtype), exponent.to(value.dtype)
    # A derivative more is wrong of one less than the exponent; eager code does not say how many.
    order = order_of(x) if transforms() else 4
    powers = range(max(order - 1, 1))
    is_whole = torch.stack([is_zeroth_power(x.detach(), y.detach() - n) for n in powers]).any(0)
    if _nowhere(is_whole):
        return value
    there = (torch.where(is_whole, y, 0) * torch.where(is_whole, x, 1).log()).exp()
    elsewhere = torch.where(is_whole, 1, x) ** torch.where(is_whole, 0.5, y)
    return with_value(value, torch.where(is_whole, there, elsewhere))


def _varies(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def polar(operation: Operation, abs: Tensor, angle: Tensor, **kwargs: Any) -> Tensor:
    """Return what torch.polar does, whose reverse rule reads the direction off the result."""
    value: Tensor = operation(abs, angle, **kwargs)
    if _nowhere(abs.detach() <= 0):
        return value
    return with_value(value, torch.complex(abs * angle.cos(), abs * angle.sin()))


def is_saturated(p: Tensor) -> Tensor:
    """Return where the rule of binary_cross_entropy divides by 1e-12 in place of p * (1 - p)."""
    return (p > 0) & (p < 1) & (p * (1 - p) < 1e-12)


def binary_cross_entropy(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what binary_cross_entropy does, by its logarithms, which are at least -100."""
    value: Tensor = operation(*args, **kwargs)
    names = ("input", "target", "weight", "size_average", "reduce", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs
    p, labels, weight = given["input"], given["target"], given.get("weight")
    is_near = is_saturated(p.detach())
    if _nowhere(is_near):
        return value
    near = torch.where(is_near, p, 0.5)
    positive, negative = near.log().clamp_min(-100), (-near).log1p().clamp_min(-100)
    each: Tensor = functional.binary_cross_entropy(
        torch.where(is_near, 0.5, p), labels, reduction="none"
    )
    each = torch.where(is_near, (labels - 1) * negative - labels * positive, each)
    each = each if weight is None else each * weight
    if value.shape == each.shape:
        return with_value(value, each)
    # The old flag; the operator beneath has a number in its place.
    is_sum = given.get("size_average") in (False, 2) or given.get("reduction") in ("sum", 2)
    return with_value(value, each.sum() if is_sum else each.mean())


def shrink(operation: Operation, input: Tensor, lambd: float = 0.5) -> Tensor:
    """Return what softshrink and hardshrink do: nothing, for a threshold of zero."""
    value: Tensor = operation(input, lambd)
    return value if lambd else with_value(value, input)


def cosine_similarity(
    operation: Operation, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8
) -> Tensor:
    """Return what it does; torch differentiates a norm where the eps stands in its place."""
    value: Tensor = operation(x1, x2, dim, eps)
    shape = (x1.detach() + x2.detach()).shape
    pair = [x.to(value.dtype).expand(shape) for x in (x1, x2)]
    small = [torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True) < eps for x in pair]
    if _nowhere(small[0] | small[1]):
        return value
    for i, is_small in enumerate(small):
        norm = torch.linalg.vector_norm(torch.where(is_small, 1, pair[i]), dim=dim, keepdim=True)
        pair[i] = pair[i] / torch.where(is_small, eps, norm)
    return with_value(value, (pair[0] * pair[1]).sum(dim))


def gaussian_nll_loss(operation: Operation, *args: Any, **kwargs: Any) -> Tensor:
    """Return what it does, with a clamp that forward mode ignores, too, as is documented."""
    names = ("input", "target", "var", "full", "eps", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(given["var"], Tensor):
        constant, eps = given["var"].detach(), given.get("eps", 1e-6)
        clamped = torch.where(constant < 0, constant, constant.clamp_min(eps))  # it refuses those
        given["var"] = clamped + (given["var"] - constant)
    result: Tensor = operation(**given)
    return result


def vander(
    operation: Operation, x: Tensor, *args: Any, increasing: bool = False, **kwargs: Any
) -> Tensor:
    """Return what torch.vander and torch.linalg.vander do, by the formula of cumprod."""
    value: Tensor = operation(x, *args, **kwargs, **{"increasing": True} if increasing else {})
    x, count = x.reshape(value.shape[:-1]), value.size(-1)
    ones = torch.ones_like(value[..., :1])
    bases = x.to(value.dtype)[..., None].expand(*x.shape, max(count - 1, 0))
    powers = torch.cat([ones, cumprod(torch.cumprod, bases, -1)], -1)[..., :count]
    is_falling = operation is torch.vander and not increasing
    return with_value(value, powers.flip(-1) if is_falling else powers)


def block_diag(operation: Operation, *tensors: Any) -> Tensor:
    """Return what torch.block_diag does, whose rule counts no row for an empty 1-D tensor."""
    given = tensors[0] if isinstance(tensors[0], list | tuple) else tensors
    matrices = [x.reshape(1, 0) if x.shape == (0,) else x for x in given]
    result: Tensor = operation(*matrices) if given is tensors else operation(matrices)
    return result
