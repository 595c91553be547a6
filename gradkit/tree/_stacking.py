"""Stacks of trees of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message
from gradkit.tree._columns import call_on_row, columns, columns_of


def stack(trees: Iterable[PyTree]) -> PyTree:
    """Return one tree whose leaves are those of K trees stacked.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.stack([{"w": torch.ones(2)}, {"w": None}])
        {'w': tensor([[1., 1.],
                [0., 0.]])}

    Args:
        trees: K trees of one structure.

    Returns:
        A tree like the first, its leaves of shape `[K, *leaf.shape]` and dense; None where every
        tree has None.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: There are no trees, or they do not match.
    """
    if isinstance(trees, Mapping | Tensor) or not isinstance(trees, Iterable):
        advice = "gradkit.tree.stack([first, second])"
        raise StructureError(message("trees", "a list of trees", describe(trees), advice))
    trees = list(trees)
    if not trees:
        advice = "gradkit.tree.stack([first, second])"
        raise StructureError(message("trees", "at least one tree", "none", advice))
    leaves, unflatten = columns_of(trees, [f"trees[{index}]" for index in range(len(trees))])
    dense = [[None if x is None else x.to_dense() for x in column] for column in leaves]
    rows = zip(*dense, strict=True)
    return unflatten([call_on_row(lambda *row: torch.stack(row), row) for row in rows])


def unstack(tree: PyTree) -> list[PyTree]:
    """Return the K trees of which this is the `stack`.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.unstack({"w": torch.tensor([[1.0], [2.0]]), "b": None})
        [{'w': tensor([1.]), 'b': None}, {'w': tensor([2.]), 'b': None}]

    Args:
        tree: Leaves of shape `[K, ...]`, or None.

    Returns:
        K trees like it, None where it has None.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: The leaves are not of one length K, or all are None.
    """
    (leaves,), unflatten = columns(tree=tree)
    count = _common_length([leaf for leaf in leaves if leaf is not None])
    rows = [
        [None] * count if leaf is None else [row.clone() for row in leaf.unbind()]
        for leaf in leaves
    ]
    return [unflatten(row) for row in zip(*rows, strict=True)]


def _common_length(leaves: Sequence[Tensor]) -> int:
    shapes = {tuple(leaf.shape) for leaf in leaves}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        got = "shapes " + " and ".join(map(str, sorted(shapes))) if shapes else "None everywhere"
        expected = "leaves of one length K in their first dimension"
        raise StructureError(message("tree", expected, got, "pass what tree.stack returned"))
    return len(leaves[0])
