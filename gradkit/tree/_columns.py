"""The leaves of one or several trees of gradients, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, describe, message

Columns: TypeAlias = list[list[Tensor | None]]
Unflatten: TypeAlias = Callable[[Sequence[Any]], PyTree]


def columns(**trees: PyTree) -> tuple[Columns, Unflatten]:
    """Return the leaves of each tree, in the order of the first, and how to build such a tree."""
    return columns_of(list(trees.values()), list(trees))


def columns_of(trees: Sequence[PyTree], names: Sequence[str]) -> tuple[Columns, Unflatten]:
    """Return the `columns` of trees with these names in error messages."""
    leaves, spec = open_tree(trees[0])
    opened = [leaves]
    for index, tree in enumerate(trees[1:], 1):
        opened.append(leaves_like(spec, tree, names.__getitem__, index))
    for index, row in enumerate(zip(*opened, strict=True)):
        _check_row(row, names, spec, index)
    return opened, spec.unflatten


def open_tree(tree: PyTree) -> tuple[list[Any], Structure]:
    """Flatten a tree; a module in it stands for its parameters, an iterator for its items."""
    return expand_params(tree, "tree", allow_distributed=True)


def leaves_like(spec: Structure, tree: PyTree, name: Callable[[int], str], index: int) -> list[Any]:
    """Return the leaves of tree `index` in the order of `spec`, the structure of tree 0."""
    leaves, own_spec = open_tree(tree)
    if own_spec == spec:
        return leaves
    opened = pytree.unflatten(own_spec, leaves)
    return pytree.flatten_up_to(spec, name(0), opened, name(index))


def _check_row(row: Sequence[Any], names: Sequence[str], spec: Structure, index: int) -> None:
    first: int | None = None
    for position, leaf in enumerate(row):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            advice = "pass a tree of gradients, as gradkit's calls return it"
            where = pytree.path(spec, index, names[position])
            raise LeafTypeError(message(where, "a tensor or None", describe(leaf), advice))
        if first is None:
            first = position
        elif leaf.shape != row[first].shape:
            raise StructureError(
                message(
                    pytree.path(spec, index, names[position]),
                    f"the shape of {pytree.path(spec, index, names[first])}, "
                    f"{tuple(row[first].shape)}",
                    f"{tuple(leaf.shape)}",
                    "pass gradients of the same parameters",
                )
            )


def call_on_row(fn: Callable[..., Any], row: Sequence[Tensor | None]) -> Any:
    """Return `fn` of the leaves, zeros in place of None; None where all are None."""
    like = next((leaf for leaf in row if leaf is not None), None)
    if like is None:
        return None
    return fn(*(torch.zeros_like(like) if leaf is None else leaf for leaf in row))
