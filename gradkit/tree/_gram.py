"""The inner products of gradients of several losses."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit._core.leaf import common_dtype, real_vector
from gradkit._core.pytree import PyTree
from gradkit.tree._per_loss import Rows, are_ordinary, as_vectors, in_groups, read_rows

# How many columns of the matrix are in memory at a time, while its Gramian is summed up.
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
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    count = len(rows.rows)
    total: Tensor | None = None
    if are_ordinary(rows):
        total = _gram_of_ordinary(rows)
        return total.triu() + total.triu(1).T
    for leaf in rows.leaves:
        present = [index for index, row in enumerate(rows.rows) if row[leaf] is not None]
        if not present:
            continue
        vectors = [real_vector(x) for row in rows.rows if (x := row[leaf]) is not None]
        part = _gram_of_vectors(vectors)
        if len(present) < count:
            places = torch.tensor(present, device=part.device)
            whole = part.new_zeros(count, count)
            part = whole.index_put((places[:, None], places[None, :]), part)
        total = part if total is None else total + part.to(total.device)
    if total is None:
        return torch.zeros(count, count)
    return total.triu() + total.triu(1).T  # symmetric to the bit, which a product need not be


def _gram_of_ordinary(rows: Rows) -> Tensor:
    parts = [_gram_of_vectors(as_vectors(rows, group)) for group in in_groups(rows)]
    return torch.stack(parts).sum(0)


def _gram_of_vectors(vectors: list[Tensor]) -> Tensor:
    dtype = common_dtype(vectors)
    total: Tensor | None = None
    for start in range(0, max(1, vectors[0].numel()), _COLUMNS_AT_A_TIME):
        block = torch.stack([v[start : start + _COLUMNS_AT_A_TIME].to(dtype) for v in vectors])
        with torch.autocast(block.device.type, enabled=False):  # it would take half precision
            part = block @ block.T
        total = part if total is None else total + part
    assert total is not None
    return total
