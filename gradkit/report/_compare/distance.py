"""How far two gradients are apart: in numbers, and in steps of their floating-point format."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def distance(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the largest difference of two gradients, where None is an exact zero.

    Args:
        a: A gradient.
        b: Another, of the same shape; of any device, layout and dtype.

    Returns:
        The largest absolute difference, and the largest in units in the last place: how many
        numbers of the coarser of their dtypes lie between two entries. Two NaN are the same.
    """
    if a is None or b is None:
        present = b if a is None else a
        return (0.0, 0.0) if present is None else distance(present, torch.zeros_like(present))
    x, y = _common(a, b)
    if not x.numel():
        return 0.0, 0.0
    alike = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(alike, 0.0, (x.double() - y.double()).abs()).nan_to_num(math.inf, math.inf)
    steps = torch.where(alike, 0.0, _steps(x, y))
    steps = torch.where(x.isfinite() & y.isfinite() | alike, steps, math.inf)
    return gap.max().item(), steps.max().item()


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients have the same bits, or are both None; NaN equals itself."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = _common(a, b)
    return torch.equal(_bits(x)[~x.isnan()], _bits(y)[~y.isnan()]) and torch.equal(
        x.isnan(), y.isnan()
    )


def is_zero(a: Tensor | None) -> bool:
    """Return whether a gradient is None, or zero everywhere."""
    return a is None or not bool(a.detach().to_dense().count_nonzero())


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients differ by no more than rounding can explain.

    That is a thousand times the precision of the coarser dtype, at most a twentieth, of the
    largest entry.
    """
    if a is None or b is None:
        return is_zero(a) and is_zero(b)
    x, y = _common(a, b)
    if not x.numel():
        return True
    largest = max(x.double().abs().max().item(), y.double().abs().max().item())
    return distance(x, y)[0] <= min(1e3 * torch.finfo(x.dtype).eps, 0.05) * largest


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as real vectors in the coarser of their dtypes; on the CPU, if apart."""
    x, y = (_real(t.detach().to_dense()) for t in (a, b))
    if x.device != y.device:
        x, y = x.cpu(), y.cpu()
    dtype = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return x.to(dtype), y.to(dtype)


def _real(t: Tensor) -> Tensor:
    flat = t.reshape(-1)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if t.is_complex() else flat


def _bits(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous().view(_INTEGERS[x.element_size()])


def _steps(x: Tensor, y: Tensor) -> Tensor:
    """Count the numbers between: bits of floats are in the order of their magnitudes."""
    left, right = (_bits(t.abs()).long() for t in (x, y))
    apart = x.signbit() != y.signbit()
    # The sum of two magnitudes of float64 is out of range for integers.
    return torch.where(apart, left.double() + right.double(), (left - right).abs().double())
