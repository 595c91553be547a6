"""The leaves of one or several trees of gradients, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, describe, message

Leaf: TypeAlias = Tensor | None
Unflatten: TypeAlias = Callable[[Sequence[Any]], PyTree]


def columns(trees: Mapping[str, PyTree]) -> tuple[list[list[Leaf]], Unflatten]:
    """Return the leaves of each tree, in the order of the first, and how to build such a tree."""
    names = list(trees)
    opened, spec = open_alike(list(trees.values()), names.__getitem__)
    for index, row in enumerate(zip(*opened, strict=True)):
        _check_row(row, names, spec, index)
    return opened, spec.unflatten


def open_alike(
    trees: Sequence[PyTree], name: Callable[[int], str]
) -> tuple[list[list[Any]], Structure]:
    """Return the leaves of each tree in the order of the first, and the structure of that."""
    # A module in a tree stands for its parameters, an iterator for its items.
    opened = [expand_params(tree, "tree", allow_distributed=True) for tree in trees]
    leaves, spec = opened[0]
    columns = [leaves]
    for index, (own_leaves, own_spec) in enumerate(opened[1:], 1):
        if own_spec != spec:
            tree = pytree.unflatten(own_spec, own_leaves)
            own_leaves = pytree.flatten_up_to(spec, name(0), tree, name(index))
        columns.append(own_leaves)
    return columns, spec


def _check_row(row: Sequence[Any], names: Sequence[str], spec: Structure, index: int) -> None:
    present = [(name, leaf) for name, leaf in zip(names, row, strict=True) if leaf is not None]
    for name, leaf in present:
        if not isinstance(leaf, Tensor):
            where = pytree.path(spec, index, name)
            fix = "pass a tree of gradients, as gradkit's calls return it"
            raise LeafTypeError(message(where, "a tensor or None", describe(leaf), fix))
        first_name, first = present[0]
        if leaf.shape != first.shape:
            where, got = pytree.path(spec, index, name), f"{tuple(leaf.shape)}"
            expected = f"the shape of {pytree.path(spec, index, first_name)}, {tuple(first.shape)}"
            fix = "pass gradients of the same parameters"
            raise StructureError(message(where, expected, got, fix))


def call_on_row(fn: Callable[..., Any], row: Sequence[Tensor | None]) -> Any:
    """Return `fn` of the leaves, zeros in place of None; None where all are None."""
    like = next((leaf for leaf in row if leaf is not None), None)
    if like is None:
        return None
    return fn(*(torch.zeros_like(like) if leaf is None else leaf for leaf in row))
