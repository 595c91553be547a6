"""The inner products of gradients of several losses."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit._core.leaf import common_dtype, real_vector
from gradkit._core.pytree import PyTree
from gradkit.tree._groups import as_vectors, can_be_grouped, in_groups
from gradkit.tree._per_loss import PerLossRows, read_rows

# The number of columns of the matrix that are in memory at a time.
_COLUMNS_AT_A_TIME = 1 << 18


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
    product = _product_of_groups(rows) if can_be_grouped(rows) else _product_of_leaves(rows)
    return product.triu() + product.triu(1).T  # the product itself may be asymmetric by rounding


def _product_of_groups(rows: PerLossRows) -> Tensor:
    return torch.stack([_product(as_vectors(rows, group)) for group in in_groups(rows)]).sum(0)


def _product_of_leaves(rows: PerLossRows) -> Tensor:
    count = len(rows.rows)
    total: Tensor | None = None
    for leaf in rows.leaves:
        present = [index for index, row in enumerate(rows.rows) if row[leaf] is not None]
        if not present:
            continue
        column = [row[leaf] for row in rows.rows]
        part = _product([real_vector(x) for x in column if x is not None])
        if len(present) < count:
            index = torch.tensor(present, device=part.device)
            zeros = part.new_zeros(count, count)
            part = zeros.index_put((index[:, None], index[None, :]), part)
        total = part if total is None else total + part.to(total.device)
    return torch.zeros(count, count) if total is None else total


def _product(vectors: list[Tensor]) -> Tensor:
    """Return the matrix of inner products, a block of columns at a time."""
    dtype = common_dtype(vectors)
    total: Tensor | None = None
    for start in range(0, max(1, vectors[0].numel()), _COLUMNS_AT_A_TIME):
        block = torch.stack([v[start : start + _COLUMNS_AT_A_TIME].to(dtype) for v in vectors])
        with torch.autocast(block.device.type, enabled=False):  # it would use half precision
            part = block @ block.T
        total = part if total is None else total + part
    assert total is not None
    return total
