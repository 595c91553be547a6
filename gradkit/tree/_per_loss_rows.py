"""The gradients of several losses as rows: one for each loss, or element of a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._compat.autograd import flatten_dense
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._arithmetic import Leaf, flatten_aligned

# The most entries of a row in one group.
_LARGEST_GROUP = 1 << 18
# A leaf with more entries is a group by itself: copying it would cost more than one more product.
_LARGEST_GROUPED = 1 << 14


@dataclass(frozen=True, slots=True)
class PerLossRows:
    """The gradients of several losses: `rows[k][i]` is leaf i of row k, or None."""

    rows: list[list[Leaf]]  # one for each loss, or for each element of one that is not a scalar
    counts: list[int]  # the number of rows of each loss
    losses: Structure
    unflatten: Callable[[Sequence[Leaf]], PyTree]  # from the leaves of a row to a tree of gradients

    @property
    def leaves(self) -> range:
        """The indices of the leaves of a row."""
        return range(len(self.rows[0]))

    def example(self, leaf: int) -> Leaf:
        """Return the gradient of some row at a leaf, or None if every row has None."""
        return next((row[leaf] for row in self.rows if row[leaf] is not None), None)

    def groups(self) -> list[list[int]] | None:
        """Return the leaves' indices, small ones together; None unless all are dense and alike."""
        leaves = list(chain.from_iterable(self.rows))
        if transforms() or set(map(type, leaves)) != {Tensor}:
            return None
        kinds = {(x.dtype, x.device, x.layout) for x in leaves if x is not None}
        dtype, _, layout = next(iter(kinds))
        if len(kinds) > 1 or dtype not in (torch.float32, torch.float64) or layout != torch.strided:
            return None
        groups: list[list[int]] = []
        group: list[int] = []
        size = 0
        for index, leaf in enumerate(cast("list[Tensor]", self.rows[0])):
            if leaf.numel() > _LARGEST_GROUPED:
                groups.append([index])
                continue
            group.append(index)
            size += leaf.numel()
            if size > _LARGEST_GROUP:
                groups.append(group)
                group, size = [], 0
        return [*groups, group] if group else groups

    def as_vectors(self, group: list[int]) -> list[Tensor]:
        """Return the leaves of a group as one vector for each row."""
        parts = [[cast("Tensor", row[leaf]) for leaf in group] for row in self.rows]
        if len(group) == 1:
            return [leaf.reshape(-1) for (leaf,) in parts]
        return [flatten_dense(leaves) for leaves in parts]


def read_per_loss_rows(per_loss: PyTree, losses: PyTree | None) -> PerLossRows:
    """Flatten a tree of losses of trees of gradients, as `per_loss_grads` returns it."""
    if isinstance(per_loss, Iterator):
        per_loss = tuple(per_loss)
    shapes: list[tuple[int, ...]]
    if losses is None:
        level = pytree.top_level(per_loss)
        shapes = [()] * level.num_leaves
    else:
        leaves, level = pytree.flatten(losses)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]
    trees = pytree.flatten_up_to(level, "losses", per_loss, "per_loss")
    if not trees or (losses is None and level.is_leaf()):
        expected = "the gradients of at least one loss, with the losses as its top level"
        fix = "pass what per_loss_grads returned; for a lone loss, also losses=, the loss itself"
        raise StructureError(message("per_loss", expected, "none", fix))
    if losses is None and isinstance(per_loss, dict):
        _refuse_gradient_of_module(dict(zip(per_loss, trees, strict=False)))

    def path(loss: int) -> str:
        return pytree.path(level, loss, "per_loss")

    def leaf_path(leaf: int, loss: int) -> str:
        return pytree.path(spec, leaf, path(loss))

    try:
        by_loss, spec = flatten_aligned(trees, path)
    except StructureError as error:
        raise StructureError(f"{error}; or {_OF_EACH_LOSS}") from None
    for leaf, column in enumerate(zip(*by_loss, strict=True)):
        _check_column(column, shapes, partial(leaf_path, leaf))
    pairs = zip(by_loss, shapes, strict=True)
    rows = [row for leaves, shape in pairs for row in _split(leaves, shape)]
    if not rows:
        fix = "leave out losses without elements"
        raise StructureError(message("losses", "at least one element", "none", fix))
    return PerLossRows(rows, list(map(prod, shapes)), level, spec.unflatten)


_OF_EACH_LOSS = (
    "pass what gradkit.per_loss_grads(losses, params) returned, whose top level is the losses, and "
    "not the gradient of one call of value_and_grads"
)


def _refuse_gradient_of_module(by_name: dict[Any, Any]) -> None:
    """Raise if these are the parameters of a module, which would be taken for losses."""
    # Other names tell nothing: per_loss_grads(losses, w) of one tensor returns such a dict, too.
    if not all(isinstance(leaf, Tensor | None) for leaf in by_name.values()):
        return
    known = [name for name in by_name if isinstance(name, str) and _is_of_parameter(name)]
    if len(known) == len(by_name) or any("." in name for name in known):
        expected = "the gradients of several losses, with the losses as its top level"
        got = f"the gradient of one sum of losses: {known[0]!r} is the name of a parameter"
        fix = f"{_OF_EACH_LOSS}; if these are the names of losses, also give losses=, the losses"
        raise StructureError(message("per_loss", expected, got, fix))


def _is_of_parameter(name: str) -> bool:
    """Return whether torch's modules have parameters of such names, and losses hardly do."""
    last = name.rpartition(".")[2]
    return (
        last in {"weight", "bias"}
        or last.endswith(("_weight", "_bias"))
        or last.startswith(("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        or "parametrizations." in name
    )


def _check_column(
    column: Sequence[Any], shapes: Sequence[tuple[int, ...]], path: Callable[[int], str]
) -> None:
    """Raise unless one leaf has the same shape in every loss, after the shape of the loss."""
    like: tuple[int, ...] | None = None
    for loss, leaf in enumerate(column):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            fix = _OF_EACH_LOSS
            raise LeafTypeError(message(path(loss), "a tensor or None", describe(leaf), fix))
        if leaf.is_nested and leaf.layout == torch.strided:  # it has no shape
            expected, got = "a dense or a sparse tensor", "a nested tensor of layout torch.strided"
            fix = "gradkit.tree.map(lambda x: torch.nested.to_padded_tensor(x, 0.0), per_loss)"
            raise LeafTypeError(message(path(loss), expected, got, fix))
        if like is None:
            like = tuple(leaf.shape[len(shapes[loss]) :])
        if leaf.shape != (*shapes[loss], *like):
            expected = f"one shape for all losses, here {(*shapes[loss], *like)}"
            fix = f"{_OF_EACH_LOSS}; or give losses=, the losses, if one of them is not a scalar"
            raise StructureError(message(path(loss), expected, f"{tuple(leaf.shape)}", fix))


def _split(leaves: list[Leaf], shape: tuple[int, ...]) -> list[list[Leaf]]:
    """Return the rows of one loss, one for each of its elements."""
    if not shape:
        return [leaves]
    last = len(shape) - 1
    columns = [
        [None] * prod(shape) if x is None else x.to_dense().flatten(0, last).unbind()
        for x in leaves
    ]
    return [list(row) for row in zip(*columns, strict=True)]
