"""Leaves of per-loss gradients in groups, for fewer and larger operations."""

from __future__ import annotations

from itertools import chain
from typing import cast

import torch
from torch import Tensor

from gradkit._compat.flatten import flatten_dense
from gradkit._compat.transforms import transforms
from gradkit.tree._per_loss import PerLossRows

# The most entries of a row in one group.
_LARGEST_GROUP = 1 << 18
# A leaf with more entries is a group by itself: copying it would cost more than one more product.
_LARGEST_GROUPED = 1 << 14
_DTYPES = (torch.float32, torch.float64)


def can_be_grouped(rows: PerLossRows) -> bool:
    """Return whether no leaf is None, and all are plain and dense, of one device and dtype."""
    if transforms():
        return False
    leaves = list(chain.from_iterable(rows.rows))
    if set(map(type, leaves)) != {Tensor}:
        return False
    kinds = {(x.dtype, x.device, x.layout) for x in leaves if x is not None}
    dtype, _, layout = next(iter(kinds))
    return len(kinds) == 1 and dtype in _DTYPES and layout == torch.strided


def in_groups(rows: PerLossRows) -> list[list[int]]:
    """Return the indices of the leaves, small ones together, each large one by itself."""
    groups: list[list[int]] = []
    group: list[int] = []
    size = 0
    for leaf in rows.leaves:
        numel = cast("Tensor", rows.rows[0][leaf]).numel()
        if numel > _LARGEST_GROUPED:
            groups.append([leaf])
            continue
        group.append(leaf)
        size += numel
        if size > _LARGEST_GROUP:
            groups.append(group)
            group, size = [], 0
    return [*groups, group] if group else groups


def as_vectors(rows: PerLossRows, group: list[int]) -> list[Tensor]:
    """Return the leaves of a group as one vector for each row."""
    if len(group) == 1:
        return [cast("Tensor", row[group[0]]).reshape(-1) for row in rows.rows]
    return [flatten_dense([cast("Tensor", row[leaf]) for leaf in group]) for row in rows.rows]
