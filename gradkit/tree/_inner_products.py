"""Inner products of vectors, the rows of a matrix that is not built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from gradkit._compat.undoing import INSIDE
from gradkit._core.leaf_arithmetic import to_common_dtype, without_autocast

# The number of columns of the matrix that `gram` has in memory at a time.
_COLUMNS_AT_A_TIME = 1 << 18


def products(vectors: list[Tensor]) -> Tensor:
    """Return the matrix of inner products, a block of columns at a time."""
    blocks = zip(*(torch.split(v, _COLUMNS_AT_A_TIME) for v in vectors), strict=True)
    total: Tensor | None = None
    for columns in blocks:
        block = torch.stack(to_common_dtype(columns))
        with without_autocast(block.device), INSIDE:
            part = block @ block.T
        total = part if total is None else total + part
    return cast("Tensor", total)


def with_zeros(product: Tensor, present: Sequence[int], count: int) -> Tensor:
    """Return the products of all rows, from those of some; what is left is zero."""
    # Not by a tensor of indices: the host would wait for its copy to the device.
    for dim in (0, 1):
        lines = dict(zip(present, product.unbind(dim), strict=True))
        zeros = torch.zeros_like(lines[present[0]])
        product = torch.stack([lines.get(row, zeros) for row in range(count)], dim)
    return product
