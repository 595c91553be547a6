"""How far two gradients are apart: in numbers, and in units in the last place."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def distance(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest in units in the last place."""
    # Such a unit is one number of the coarser of the two dtypes. None is zero; NaN equals itself.
    if a is None or b is None:
        present = b if a is None else a
        return (0.0, 0.0) if present is None else distance(present, torch.zeros_like(present))
    x, y = _common(a, b)
    if not x.numel():
        return 0.0, 0.0
    equal = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(equal, 0.0, (x.double() - y.double()).abs()).nan_to_num(math.inf, math.inf)
    ulps = torch.where(x.isfinite() & y.isfinite(), _ulps(x, y), math.inf).masked_fill(equal, 0.0)
    return gap.max().item(), ulps.max().item()


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients have the same bits, or are both None; NaN equals itself."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = _common(a, b)
    nan = x.isnan()
    return torch.equal(nan, y.isnan()) and torch.equal(_bits(x)[~nan], _bits(y)[~nan])


def is_zero(a: Tensor | None) -> bool:
    """Return whether a gradient is None, or zero everywhere."""
    return a is None or not bool(a.detach().to_dense().count_nonzero())


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether rounding can explain a difference: at most 1000 eps, or 5 %, of the max."""
    if a is None or b is None:
        return is_zero(a) and is_zero(b)
    x, y = _common(a, b)
    if not x.numel():
        return True
    largest = max(x.double().abs().max().item(), y.double().abs().max().item())
    return distance(x, y)[0] <= min(1e3 * torch.finfo(x.dtype).eps, 0.05) * largest


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as real vectors of the coarser dtype; on the CPU if their devices differ."""
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


def _ulps(x: Tensor, y: Tensor) -> Tensor:
    """Count the numbers between: the bits of floats are ordered as their magnitudes are."""
    left, right = (_bits(t.abs()).long() for t in (x, y))
    # The sum of two magnitudes of float64 is out of range for integers.
    total, gap = left.double() + right.double(), (left - right).abs().double()
    return torch.where(x.signbit() != y.signbit(), total, gap)
