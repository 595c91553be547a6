"""Inner products of gradients of any size: neither squares nor sums overflow or underflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradkit._core.leaf_arithmetic import largest
from gradkit.tree._matrix import gram
from gradkit.tree._per_loss import PerLossRows

_SMALL, _LARGE = 1e-12, 1e12  # squares of float32 between these, and sums, are far from its limits
_LOWEST = -149  # below this power of two float32 has only zero
_NOTHING = -2200.0  # the power of two of a row of zeros: below every other, so it decides nothing


@dataclass(frozen=True)
class Products:
    """`matrix[i, j] * 2**(powers[i] + powers[j])`, of K rows, in float64 on the CPU."""

    matrix: Tensor
    powers: Tensor

    @staticmethod
    def total(parts: Sequence[Products]) -> Products:
        """Return the products of rows that consist of parts."""
        powers = torch.stack([part.powers for part in parts]).amax(0)
        matrix = torch.zeros_like(parts[0].matrix)
        for part in parts:
            scale = torch.exp2(part.powers - powers)
            matrix = matrix + part.matrix * scale[:, None] * scale[None, :]
        return Products(matrix, powers)

    def norms(self) -> Tensor:
        """Return the norm of every row: `[K]`."""
        return self.matrix.diagonal().sqrt() * torch.exp2(self.powers)

    def cosines(self) -> Tensor:
        """Return the cosines between rows: `[K, K]`, 0 where one is zero, nan if not finite."""
        lengths = self.matrix.diagonal().sqrt()
        is_zero = lengths == 0
        lengths = torch.where(is_zero, 1.0, lengths)
        cosines = (self.matrix / (lengths[:, None] * lengths[None, :])).clamp(-1, 1)
        cosines.diagonal()[lengths.isfinite()] = 1.0
        return cosines.masked_fill(is_zero[:, None] | is_zero[None, :], 0.0)


@torch.no_grad()
def products_of(rows: PerLossRows, leaves: Sequence[int]) -> Products:
    """Return the inner products of some leaves of the rows, each of which some row has."""
    picked = [[row[leaf] for leaf in leaves] for row in rows.rows]
    tops = [float(largest(row)) for row in picked]
    powers = [_power(top) for top in tops]
    scaled = [
        [None if leaf is None else _divided(leaf, power) for leaf in row] if power else row
        for row, power in zip(picked, powers, strict=True)
    ]
    shown = [power if top else _NOTHING for power, top in zip(powers, tops, strict=True)]
    matrix = gram(scaled).to("cpu", torch.float64)
    return Products(matrix, torch.tensor(shown, dtype=torch.float64))


def _power(top: float) -> int:
    """Return the power of two to take out of a row, of which 0 is none."""
    is_kept = top == 0 or _SMALL <= top <= _LARGE or not top < math.inf
    return 0 if is_kept else math.frexp(top)[1]


def _divided(leaf: Tensor, power: int) -> Tensor:
    """Divide by a power of two, in two steps that the range of the dtype allows."""
    if power < _LOWEST and leaf.dtype not in (torch.float64, torch.complex128):
        return leaf  # zeros, next to what only float64 can hold
    half = power // 2
    return leaf * 2.0**-half * 2.0 ** (half - power)
