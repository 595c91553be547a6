"""The gradients of several losses as a matrix, and its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradkit._core.leaf_arithmetic import from_real_vector, promoted, real_vector, width
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message
from gradkit.tree._columns import Leaf
from gradkit.tree._per_loss import PerLossRows, read_rows

# The number of columns of the matrix that `gram` has in memory at a time.
_COLUMNS_AT_A_TIME = 1 << 18


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
    widths = [width(like) for _, like in likes]

    def unravel(vector: Tensor) -> PyTree:
        leaves: list[Leaf] = [None] * len(rows.leaves)
        if likes:
            check_vector("unravel", vector, sum(widths))
            parts = torch.split(vector, widths)
            for (leaf, like), part in zip(likes, parts, strict=True):
                leaves[leaf] = from_real_vector(part.to(like.device), like).clone()
        return rows.unflatten(leaves)

    if not likes:
        return torch.zeros(len(rows.rows), 0), unravel
    return torch.stack([_as_vector(row, likes) for row in rows.rows]), unravel


def _as_vector(row: Sequence[Leaf], likes: Sequence[tuple[int, Tensor]]) -> Tensor:
    pairs = [(row[leaf], like) for leaf, like in likes]
    parts = [
        real_vector(torch.zeros_like(like, layout=torch.strided) if leaf is None else leaf)
        for leaf, like in pairs
    ]
    return torch.cat(promoted(parts))


def check_vector(name: str, vector: object, length: int) -> None:
    """Raise unless this is a vector with an entry for each column of the matrix."""
    if not isinstance(vector, Tensor) or vector.shape != (length,):
        got = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else describe(vector)
        expected = f"a vector of shape ({length},)"
        fix = "reduce the matrix over its rows: matrix.mean(0)"
        raise StructureError(message(name, expected, got, fix))


def gram(per_loss: PyTree, *, losses: PyTree | None = None) -> Tensor:
    """Return the inner products of the losses' gradients, without building their matrix.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.gram([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 3.0])}])
        tensor([[5., 6.],
                [6., 9.]])

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        losses: As in `to_matrix`.

    Returns:
        `[K, K]`, symmetric, on the device of the first leaf, in the leaves' common dtype, float32
        at least: `matrix @ matrix.T` for the matrix of `to_matrix`.

    Raises:
        LeafTypeError: A gradient is not a tensor.
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    groups = rows.groups()
    if groups is None:
        product = _product_of_leaves(rows)
    else:
        product = torch.stack([_product(rows.as_vectors(group)) for group in groups]).sum(0)
    return product.triu() + product.triu(1).T  # the product itself may be asymmetric by rounding


def _product_of_leaves(rows: PerLossRows) -> Tensor:
    count = len(rows.rows)
    total: Tensor | None = None
    for leaf in rows.leaves:
        column = [row[leaf] for row in rows.rows]
        present = [index for index, x in enumerate(column) if x is not None]
        if not present:
            continue
        part = _product([real_vector(x) for x in column if x is not None])
        if len(present) < count:
            index = torch.tensor(present, device=part.device)
            zeros = part.new_zeros(count, count)
            part = zeros.index_put((index[:, None], index[None, :]), part)
        total = part if total is None else total + part.to(total.device)
    return torch.zeros(count, count) if total is None else total


def _product(vectors: list[Tensor]) -> Tensor:
    """Return the matrix of inner products, a block of columns at a time."""
    blocks = zip(*(torch.split(v, _COLUMNS_AT_A_TIME) for v in vectors), strict=True)
    total: Tensor | None = None
    for columns in blocks:
        block = torch.stack(promoted(columns))
        with torch.autocast(block.device.type, enabled=False):  # it would use half precision
            part = block @ block.T
        total = part if total is None else total + part
    assert total is not None
    return total
