"""The weighted sum of the gradients of several losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.leaf import plus
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._groups import as_vectors, can_be_grouped, in_groups
from gradkit.tree._numbers import is_real_number
from gradkit.tree._per_loss import PerLossRows, read_rows


def weighted_sum(
    per_loss: PyTree, weights: PyTree = None, *, losses: PyTree | None = None
) -> PyTree:
    """Return the weighted sum of the losses' gradients, added in the order of the losses.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": None}}
        >>> gradkit.tree.weighted_sum(per_loss, {"a": 0.5, "b": 2.0})
        {'w': tensor([0.5000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        weights: Numbers or tensors in the structure of the losses, or a prefix of it; or a tensor
            of K weights. None is all ones.
        losses: As in `to_matrix`.

    Returns:
        A tree like the gradients of one loss, in their dtypes; None where every loss has None.

    Raises:
        LeafTypeError: A gradient is not a tensor, or a weight is not a real number.
        StructureError: There are no losses, or trees do not match.
    """
    if isinstance(per_loss, Iterator):
        per_loss = tuple(per_loss)
    rows = read_rows(per_loss, losses)
    by_row = _row_weights(per_loss, weights, losses, rows)
    if can_be_grouped(rows) and not any(
        x.requires_grad for x in chain(by_row, *rows.rows) if isinstance(x, Tensor)
    ):
        return rows.unflatten(_sum_in_groups(rows, by_row))
    total: list[Tensor | None] = [None] * len(rows.leaves)
    for row, weight in zip(rows.rows, by_row, strict=True):
        scaled = row if weight is None else [_times(leaf, weight) for leaf in row]
        total = [plus(a, b) for a, b in zip(total, scaled, strict=True)]
    return rows.unflatten(total)


def _sum_in_groups(rows: PerLossRows, weights: Sequence[Any]) -> list[Tensor | None]:
    """Return the same sums, added in the same order, several leaves at a time."""
    sums: list[Tensor | None] = [None] * len(rows.leaves)
    for group in in_groups(rows):
        total: Tensor | None = None
        for vector, weight in zip(as_vectors(rows, group), weights, strict=True):
            scaled = vector if weight is None else _times(vector, weight)
            total = plus(None, scaled) if total is None else total.add_(cast("Tensor", scaled))
        likes = [cast("Tensor", rows.rows[0][leaf]) for leaf in group]
        parts = torch.split(cast("Tensor", total), [like.numel() for like in likes])
        for leaf, part, like in zip(group, parts, likes, strict=True):
            sums[leaf] = torch.empty_like(like).copy_(part.view(like.shape))
    return sums


def _row_weights(
    per_loss: PyTree, weights: PyTree, losses: PyTree | None, rows: PerLossRows
) -> list[Any]:
    """Return the weight of each row, checked; None is one."""
    count = len(rows.rows)
    if weights is None:
        return [None] * count
    if isinstance(weights, Tensor) and weights.dim() == 1:
        if len(weights) != count:
            expected = f"{count} weights, one for each loss"
            advice = "weights=torch.ones(...) of that length, or a tree like the losses"
            raise StructureError(message("weights", expected, str(len(weights)), advice))
        return [_weight(weight) for weight in weights]
    if losses is None:
        level, unflatten = pytree.children(per_loss)
        losses = unflatten([0.0] * len(level))
    by_loss = pytree.broadcast_prefix(weights, "weights", losses, "losses")
    by_row: list[Any] = []
    for weight, repeat in zip(by_loss, rows.counts, strict=True):
        if isinstance(weight, Tensor) and weight.numel() == repeat != 1:
            by_row += [_weight(element) for element in weight.reshape(-1)]
        else:
            by_row += [_weight(weight)] * repeat
    return by_row


def _weight(weight: Any) -> float | Tensor:
    """Return the weight of one row: a real number, or a 0-dim tensor of one."""
    if not is_real_number(weight):
        expected = "a real number or a real tensor of one element for each loss"
        advice = "weights=dict(zip(losses, weights)) for a tensor of several"
        raise LeafTypeError(message("weights", expected, describe(weight), advice))
    return weight.reshape(()) if isinstance(weight, Tensor) else cast("float", weight)


def _times(leaf: Tensor | None, weight: float | Tensor) -> Tensor | None:
    if leaf is None:
        return None
    if isinstance(weight, Tensor):
        weight = weight.to(leaf.device)
    return (leaf * weight).to(leaf.dtype)
