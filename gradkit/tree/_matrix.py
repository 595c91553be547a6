"""The gradients of several losses as a matrix, and one gradient out of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.leaf import common_dtype, from_real_vector, plus, real_vector, width
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._per_loss import Rows, are_ordinary, as_vectors, in_groups, read_rows


def to_matrix(
    per_loss: PyTree, *, losses: PyTree | None = None
) -> tuple[Tensor, Callable[[Tensor], PyTree]]:
    """Return the gradients as one matrix, a row a loss, and the way back for a vector.

    Example:
        >>> import torch, gradkit
        >>> matrix, unravel = gradkit.tree.to_matrix({"a": {"w": torch.ones(2)}, "b": {"w": None}})
        >>> matrix
        tensor([[1., 1.],
                [0., 0.]])
        >>> unravel(matrix.sum(0))
        {'w': tensor([1., 1.])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        losses: A tree with the structure of the losses, where it is deeper; the losses themselves
            where one is no scalar, whose elements are rows then.

    Returns:
        `(matrix, unravel)`. `matrix`: `[K, n]`, the leaves in order, in their common dtype, float32
        at least; a complex entry is two columns; a leaf that is None for every loss has none.
        `unravel`: from `[n]` to a tree like a loss's gradients, in their dtypes, None where it is
        None for every loss.

    Raises:
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    likes = [rows.example(leaf) for leaf in rows.leaves]
    present = [leaf for leaf, like in enumerate(likes) if like is not None]
    widths = [width(like) for like in likes if like is not None]
    if not present:
        return torch.zeros(len(rows.rows), 0), lambda vector: rows.unflatten(likes)

    def as_vector(row: list[Tensor | None]) -> Tensor:
        parts = [_vector_or_zeros(row[leaf], likes[leaf]) for leaf in present]
        dtype = common_dtype(parts)
        return torch.cat([part.to(parts[0].device, dtype) for part in parts])

    def unravel(vector: Tensor) -> PyTree:
        if vector.shape != (sum(widths),):
            do = "reduce the matrix over its rows: matrix.mean(0)"
            wanted = f"a vector of shape ({sum(widths)},)"
            raise StructureError(message("unravel", wanted, f"{tuple(vector.shape)}", do))
        leaves: list[Tensor | None] = [None] * len(likes)
        for leaf, part in zip(present, torch.split(vector, widths), strict=True):
            like = likes[leaf]
            assert like is not None
            leaves[leaf] = from_real_vector(part.to(like.device), like).clone()
        return rows.unflatten(leaves)

    return torch.stack([as_vector(row) for row in rows.rows]), unravel


def _vector_or_zeros(leaf: Tensor | None, like: Tensor | None) -> Tensor:
    if leaf is not None:
        return real_vector(leaf)
    assert like is not None
    return real_vector(torch.zeros_like(like, layout=torch.strided))


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
        A tree like a loss's gradients, in their dtypes; None where it is None for every loss.

    Raises:
        LeafTypeError: A weight is no real number.
        StructureError: There are no losses, or trees do not match.
    """
    rows = read_rows(per_loss, losses)
    by_row = _row_weights(per_loss, weights, losses, rows)
    if are_ordinary(rows) and not any(
        x.requires_grad for x in chain(by_row, *rows.rows) if isinstance(x, Tensor)
    ):
        return rows.unflatten(_sum_of_ordinary(rows, by_row))
    total: list[Tensor | None] = [None] * len(rows.leaves)
    for row, weight in zip(rows.rows, by_row, strict=True):
        scaled = row if weight is None else [_times(leaf, weight) for leaf in row]
        total = [plus(a, b) for a, b in zip(total, scaled, strict=True)]
    return rows.unflatten(total)


def _sum_of_ordinary(rows: Rows, weights: Sequence[Any]) -> list[Tensor | None]:
    """Add group by group: the same sums, in the same order."""
    found: list[Tensor | None] = [None] * len(rows.leaves)
    for group in in_groups(rows):
        total: Tensor | None = None
        for vector, weight in zip(as_vectors(rows, group), weights, strict=True):
            scaled = vector if weight is None else _times(vector, weight)
            total = plus(None, scaled) if total is None else total.add_(cast("Tensor", scaled))
        likes = [cast("Tensor", rows.rows[0][leaf]) for leaf in group]
        parts = torch.split(cast("Tensor", total), [like.numel() for like in likes])
        for leaf, part, like in zip(group, parts, likes, strict=True):
            found[leaf] = torch.empty_like(like).copy_(part.view(like.shape))
    return found


def _row_weights(per_loss: PyTree, weights: PyTree, losses: PyTree | None, rows: Rows) -> list[Any]:
    count = len(rows.rows)
    if weights is None:
        return [None] * count
    if isinstance(weights, Tensor) and weights.dim() == 1:
        weights_of_rows: list[Any] = list(weights)
        if len(weights_of_rows) != count:
            raise StructureError(
                message("weights", f"{count} weights", f"{len(weights)}", "one for each loss")
            )
        return [_scalar(weight) for weight in weights_of_rows]
    if losses is None:
        level, unflatten = pytree.children(per_loss)
        losses = unflatten([0.0] * len(level))
    spread = pytree.broadcast_prefix(weights, "weights", losses, "losses")
    found: list[Any] = []
    for weight, repeat in zip(spread, rows.counts, strict=True):
        if isinstance(weight, Tensor) and weight.numel() == repeat != 1:
            found += [_scalar(one) for one in weight.reshape(-1)]
        else:
            found += [_scalar(weight)] * repeat
    return found


def _scalar(weight: object) -> float | Tensor:
    """Return the weight of one row, checked: a real number, or a 0-dim tensor of one."""
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        return weight.reshape(())
    if isinstance(weight, Real):
        return cast("float", weight)
    raise LeafTypeError(
        message(
            "weights",
            "a real number or a real tensor of one element for each loss",
            describe(weight),
            "weights=dict(zip(losses, weights)) for a tensor of several",
        )
    )


def _times(leaf: Tensor | None, weight: float | Tensor) -> Tensor | None:
    if leaf is None:
        return None
    if isinstance(weight, Tensor):
        weight = weight.to(leaf.device)
    return (leaf * weight).to(leaf.dtype)


def combine(
    per_loss: PyTree,
    aggregator: Callable[[Tensor], Tensor] | PyTree,
    *,
    losses: PyTree | None = None,
) -> PyTree:
    """Return one gradient made of several losses' gradients.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": torch.tensor([3.0, 0.0])}}
        >>> gradkit.combine(per_loss, lambda matrix: matrix.mean(0))
        {'w': tensor([2.0000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        aggregator: From the matrix `[K, n]` of `to_matrix` to a vector `[n]`: a TorchJD aggregator
            as it is, say. Or weights, as in `weighted_sum`, which builds no matrix.
        losses: As in `to_matrix`.

    Returns:
        A tree like a loss's gradients, in their dtypes; None where it is None for every loss.

    Raises:
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
    if not isinstance(vector, Tensor) or vector.shape != matrix.shape[1:]:
        got = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else repr(type(vector))
        raise StructureError(
            message(
                "the aggregator's result",
                f"a vector of shape {tuple(matrix.shape[1:])}",
                got,
                "reduce the matrix over its rows: matrix.mean(0)",
            )
        )
    return unravel(vector)
