"""The gradients of several losses as a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._core.leaf import common_dtype, from_real_vector, real_vector, width
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message
from gradkit.tree._per_loss import PerLossRows, read_rows

# The leaves that are not None for every loss: the index, and the gradient of some loss.
_Likes: TypeAlias = list[tuple[int, Tensor]]


def to_matrix(
    per_loss: PyTree, *, losses: PyTree | None = None
) -> tuple[Tensor, Callable[[Tensor], PyTree]]:
    """Return the matrix with one row per loss, and the function from a vector back to a tree.

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
        losses: A tree with the structure of the losses, if that is deeper than one level; the
            losses themselves, if one of them is not a scalar: each of its elements is a row.

    Returns:
        `(matrix, unravel)`. `matrix`: `[K, n]`, the leaves in order, in their common dtype, float32
        at least; a complex entry is two columns; a leaf that is None for every loss has no column.
        `unravel`: from `[n]` to a tree like the gradients of one loss, in their dtypes; None where
        every loss has None.

    Raises:
        LeafTypeError: A gradient is not a tensor.
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    examples = [(leaf, rows.example(leaf)) for leaf in rows.leaves]
    likes = [(leaf, like) for leaf, like in examples if like is not None]
    if not likes:
        empty = rows.unflatten([None] * len(rows.leaves))
        return torch.zeros(len(rows.rows), 0), lambda vector: empty
    vectors = [_as_vector(row, likes) for row in rows.rows]
    return torch.stack(vectors), lambda vector: _unravel(vector, rows, likes)


def _as_vector(row: Sequence[Tensor | None], likes: _Likes) -> Tensor:
    parts = [
        real_vector(torch.zeros_like(like, layout=torch.strided) if leaf is None else leaf)
        for leaf, like in ((row[index], like) for index, like in likes)
    ]
    dtype = common_dtype(parts)
    return torch.cat([part.to(parts[0].device, dtype) for part in parts])


def _unravel(vector: Tensor, rows: PerLossRows, likes: _Likes) -> PyTree:
    widths = [width(like) for _, like in likes]
    if not isinstance(vector, Tensor) or vector.shape != (sum(widths),):
        got = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else describe(vector)
        expected = f"a vector of shape ({sum(widths)},)"
        advice = "reduce the matrix over its rows: matrix.mean(0)"
        raise StructureError(message("unravel", expected, got, advice))
    leaves: list[Tensor | None] = [None] * len(rows.leaves)
    for (leaf, like), part in zip(likes, torch.split(vector, widths), strict=True):
        leaves[leaf] = from_real_vector(part.to(like.device), like).clone()
    return rows.unflatten(leaves)
