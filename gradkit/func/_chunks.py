"""A batch in chunks: a tree whose tensors have one first dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message


class Batch:
    """A tree of tensors with one first dimension; what is no tensor belongs to every chunk."""

    def __init__(self, tree: PyTree, root: str) -> None:
        self._tree = tree
        leaves, spec = pytree.flatten(tree)
        sizes: dict[int, str] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                path = pytree.path(spec, index, root)
                if leaf.dim() == 0:
                    expected, got = "a tensor with a first dimension", "one without dimensions"
                    fix = "close over it, or give it as a number"
                    raise StructureError(message(path, expected, got, fix))
                sizes.setdefault(leaf.shape[0], path)
        if len(sizes) != 1:
            got = ", ".join(f"{size} in {path}" for size, path in sizes.items()) or "no tensor"
            fix = "pass tensors of as many rows; close over what is no part of the batch"
            raise StructureError(message(root, "tensors with one first dimension", got, fix))
        (self.size,) = sizes

    def chunks(self, chunk_size: int | None) -> list[PyTree]:
        """Return the parts of the batch, in order; one if there is no chunk size."""
        if chunk_size is None or chunk_size >= self.size:
            return [self._tree]
        leaves, spec = pytree.flatten(self._tree)
        count = -(-self.size // chunk_size)
        columns = [
            torch.split(leaf, chunk_size) if isinstance(leaf, Tensor) else [leaf] * count
            for leaf in leaves
        ]
        return [pytree.unflatten(spec, parts) for parts in zip(*columns, strict=True)]


def joined(trees: Sequence[PyTree], root: str) -> tuple[PyTree, list[list[int]]]:
    """Return trees of one structure as one, each tensor joined, and the rows of each by tree."""
    spec = pytree.flatten(trees[0])[1]
    columns = list(zip(*(pytree.flatten_up_to(spec, root, t, root) for t in trees), strict=True))
    for index, column in enumerate(columns):
        if column[0].dim() == 0:
            expected = "a tensor with a first dimension, along which those of the chunks are joined"
            fix = "return one row for each sample; or value[None], for one row a chunk"
            path = pytree.path(spec, index, root)
            raise StructureError(message(path, expected, describe(column[0]), fix))
    rows = [[tensor.shape[0] for tensor in column] for column in columns]
    return pytree.unflatten(spec, [torch.cat(column) for column in columns]), rows


def separated(tree: PyTree, rows: list[list[int]]) -> list[PyTree]:
    """Return the trees that `joined` would make this one of."""
    leaves, spec = pytree.flatten(tree)
    columns = [torch.split(leaf, sizes) for leaf, sizes in zip(leaves, rows, strict=True)]
    return [pytree.unflatten(spec, parts) for parts in zip(*columns, strict=True)]
