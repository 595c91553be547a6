"""The gradients of several losses, one row for each loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._columns import leaves_like, open_tree


@dataclass(frozen=True, slots=True)
class PerLossRows:
    """The gradients of several losses: `rows[k][i]` is leaf i of row k, or None.

    Attributes:
        rows: One list of leaves for each loss, or for each element of a loss that is not a scalar.
        counts: The number of rows of each loss.
        unflatten: From the leaves of a row to a tree of gradients.
    """

    rows: list[list[Tensor | None]]
    counts: list[int]
    unflatten: Callable[[Sequence[Tensor | None]], PyTree]

    def example(self, leaf: int) -> Tensor | None:
        """Return the gradient of some row at a leaf, or None if every row has None."""
        return next((row[leaf] for row in self.rows if row[leaf] is not None), None)

    @property
    def leaves(self) -> range:
        """The indices of the leaves of a row."""
        return range(len(self.rows[0]))


def read_rows(per_loss: PyTree, losses: PyTree | None) -> PerLossRows:
    """Flatten a tree of losses of trees of gradients, as `per_loss_grads` returns it."""
    if isinstance(per_loss, Iterator):
        per_loss = tuple(per_loss)
    trees, level, shapes = _by_loss(per_loss, losses)
    if not trees or (losses is None and trees[0] is per_loss):
        expected = "the gradients of at least one loss, with the losses as its top level"
        advice = "pass what per_loss_grads returned; for a lone loss, also losses=, the loss itself"
        raise StructureError(message("per_loss", expected, "none", advice))

    def path(loss: int) -> str:
        return pytree.path(level, loss, "per_loss")

    leaves, spec = open_tree(trees[0])
    by_loss = [leaves]
    for loss, tree in enumerate(trees[1:], 1):
        by_loss.append(leaves_like(spec, tree, path, loss))
    for leaf, column in enumerate(zip(*by_loss, strict=True)):
        _check_column(column, shapes, partial(_leaf_path, spec, leaf, path))
    rows = [row for i, shape in enumerate(shapes) for row in _split(by_loss[i], shape)]
    if not rows:
        advice = "leave out losses without elements"
        raise StructureError(message("losses", "at least one element", "none", advice))
    return PerLossRows(rows, [torch.Size(shape).numel() for shape in shapes], spec.unflatten)


def _leaf_path(spec: Structure, leaf: int, path: Callable[[int], str], loss: int) -> str:
    return pytree.path(spec, leaf, path(loss))


def _by_loss(
    per_loss: PyTree, losses: PyTree | None
) -> tuple[list[PyTree], Structure, list[tuple[int, ...]]]:
    """Return the tree of each loss, the structure of the losses, and their shapes."""
    if losses is None:
        trees, _ = pytree.children(per_loss)
        return trees, pytree.top_level(per_loss), [()] * len(trees)
    leaves, spec = pytree.flatten(losses)
    trees = pytree.flatten_up_to(spec, "losses", per_loss, "per_loss")
    return trees, spec, [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]


def _check_column(
    column: Sequence[Any], shapes: Sequence[tuple[int, ...]], path: Callable[[int], str]
) -> None:
    """Raise unless one leaf has the same shape in every loss, after the shape of the loss."""
    like: tuple[int, ...] | None = None
    for loss, leaf in enumerate(column):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            advice = "pass what per_loss_grads returned"
            raise LeafTypeError(message(path(loss), "a tensor or None", describe(leaf), advice))
        if like is None:
            like = tuple(leaf.shape[len(shapes[loss]) :])
        if leaf.shape != (*shapes[loss], *like):
            expected = f"one shape for all losses, here {(*shapes[loss], *like)}"
            advice = "give losses=, the losses themselves, if one of them is not a scalar"
            raise StructureError(message(path(loss), expected, f"{tuple(leaf.shape)}", advice))


def _split(leaves: list[Tensor | None], shape: tuple[int, ...]) -> list[list[Tensor | None]]:
    """Return the rows of one loss, one for each of its elements."""
    if not shape:
        return [leaves]
    count = torch.Size(shape).numel()
    dense = [x if x is None or x.layout == torch.strided else x.to_dense() for x in leaves]
    columns = [
        [None] * count if leaf is None else leaf.reshape(count, *leaf.shape[len(shape) :]).unbind()
        for leaf in dense
    ]
    return [list(row) for row in zip(*columns, strict=True)]
