"""One gradient made of the gradients of several losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.leaf_arithmetic import plus
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._arithmetic import is_real_number
from gradkit.tree._columns import Leaf
from gradkit.tree._matrix import check_vector, to_matrix
from gradkit.tree._per_loss import PerLossRows, read_rows

_Weight: TypeAlias = float | Tensor


def combine(
    per_loss: PyTree,
    aggregator: Callable[[Tensor], Tensor] | PyTree,
    *,
    losses: PyTree | None = None,
) -> PyTree:
    """Return one gradient made of the gradients of several losses.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": torch.tensor([3.0, 0.0])}}
        >>> gradkit.combine(per_loss, lambda matrix: matrix.mean(0))
        {'w': tensor([2.0000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        aggregator: A function from the matrix `[K, n]` of `to_matrix` to a vector `[n]`, such as
            an aggregator of TorchJD. Or weights, as in `weighted_sum`, which builds no matrix.
        losses: As in `to_matrix`.

    Returns:
        A tree like the gradients of one loss, in their dtypes; None where every loss has None.

    Raises:
        LeafTypeError: A gradient is not a tensor, or a weight is not a real number.
        StructureError: There are no losses, trees do not match, or the aggregator returns another
            shape than `[n]`.

    Source:
        Aggregators: Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
        https://arxiv.org/abs/2406.16232
    """
    if not callable(aggregator):
        return weighted_sum(per_loss, aggregator, losses=losses)
    matrix, unravel = to_matrix(per_loss, losses=losses)
    vector = aggregator(matrix)
    check_vector("the aggregator's result", vector, matrix.shape[1])
    return unravel(vector)


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
    tensors = (x for x in chain(by_row, *rows.rows) if isinstance(x, Tensor))
    groups = rows.groups()
    if groups is not None and not any(x.requires_grad for x in tensors):
        return rows.unflatten(_sum_in_groups(rows, groups, by_row))
    total: list[Leaf] = [None] * len(rows.leaves)
    for row, weight in zip(rows.rows, by_row, strict=True):
        scaled = [None if leaf is None else _times(leaf, weight) for leaf in row]
        total = [plus(a, b) for a, b in zip(total, scaled, strict=True)]
    return rows.unflatten(total)


def _sum_in_groups(
    rows: PerLossRows, groups: list[list[int]], weights: list[_Weight | None]
) -> list[Leaf]:
    """Return the same sums, added in the same order, several leaves at a time."""
    sums: list[Leaf] = [None] * len(rows.leaves)
    for group in groups:
        pairs = zip(rows.as_vectors(group), weights, strict=True)
        total: Tensor | None = None
        for vector, weight in pairs:
            scaled = _times(vector, weight)
            total = scaled.clone() if total is None else total.add_(scaled)
        likes = [cast("Tensor", rows.rows[0][leaf]) for leaf in group]
        parts = torch.split(cast("Tensor", total), [like.numel() for like in likes])
        for leaf, part, like in zip(group, parts, likes, strict=True):
            sums[leaf] = torch.empty_like(like).copy_(part.view(like.shape))
    return sums


def _row_weights(
    per_loss: PyTree, weights: PyTree, losses: PyTree | None, rows: PerLossRows
) -> list[_Weight | None]:
    """Return the weight of each row, checked; None is one."""
    count = len(rows.rows)
    if weights is None:
        return [None] * count
    if isinstance(weights, Tensor) and weights.dim() == 1:
        if len(weights) != count:
            expected = f"{count} weights, one for each loss"
            fix = "weights=torch.ones(...) of that length, or a tree like the losses"
            raise StructureError(message("weights", expected, str(len(weights)), fix))
        return [_weight(weight) for weight in weights]
    if losses is None:
        level, unflatten = pytree.children(per_loss)
        losses = unflatten([0.0] * len(level))
    by_loss = pytree.broadcast_prefix(weights, "weights", losses, "losses")
    by_row: list[_Weight | None] = []
    for weight, repeat in zip(by_loss, rows.counts, strict=True):
        of_elements = isinstance(weight, Tensor) and weight.numel() == repeat != 1
        by_row += map(_weight, weight.reshape(-1) if of_elements else [weight] * repeat)
    return by_row


def _weight(weight: Any) -> _Weight:
    """Return the weight of one row: a real number, or a 0-dim tensor of one."""
    if not is_real_number(weight):
        expected = "a real number or a real tensor of one element for each loss"
        fix = "weights=dict(zip(losses, weights)) for a tensor of several"
        raise LeafTypeError(message("weights", expected, describe(weight), fix))
    return weight.reshape(()) if isinstance(weight, Tensor) else cast("float", weight)


def _times(leaf: Tensor, weight: _Weight | None) -> Tensor:
    if weight is None:
        return leaf
    by = weight.to(leaf.device) if isinstance(weight, Tensor) else weight
    return (leaf * by).to(leaf.dtype)
