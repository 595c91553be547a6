"""Arithmetic on leaves of trees of gradients: sums, inner products, norms; None is an exact zero.

Inner products are real, in the leaves' common dtype, float32 at least, and not under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from gradkit._compat import distributed
from gradkit._compat.transforms import is_transform_tensor
from gradkit._compat.undoing import INSIDE
from gradkit.errors import LeafTypeError, UnsupportedGraphError, describe, first_line, message

# Sparse tensors of which one dimension is compressed: most operations do not take them.
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
# The dtypes that torch's arithmetic takes in place; of float8 and complex32 it has but some.
ARITHMETIC_DTYPES = frozenset({
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
})


def why_it_fails(operation: Callable[[], object]) -> str | None:
    """Return what torch says if it cannot run an operation, which is on copies; None if it can."""
    try:
        operation()
    except (RuntimeError, IndexError) as error:  # IndexError: a block matrix plus another
        return first_line(error)
    return None


def common_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum, float32 at least."""
    # torch promotes no float8.
    wider = (torch.float32 if dtype.itemsize == 1 else dtype for dtype in dtypes)
    return reduce(torch.promote_types, wider, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Leave autocast, which would compute products in half precision."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return INSIDE  # meta has none
    return torch.autocast(kind, enabled=False)


def uncompressed(tensor: Tensor) -> Tensor:
    """Return a tensor of a compressed layout as one of `torch.sparse_coo`; others as they are."""
    return tensor.to_sparse() if tensor.layout in _COMPRESSED else tensor


def add_leaves(*summands: Tensor | None) -> Tensor | None:
    """Return a sum in new memory. Sparse plus sparse stays sparse, else the sum is dense."""
    present = [x for x in summands if x is not None]
    if len(present) < 2:
        return present[0].clone() if present else None
    return reduce(_add, present)


def _add(a: Tensor, b: Tensor) -> Tensor:
    if not a.layout == b.layout == torch.sparse_csr:  # the only compressed one that torch adds
        a, b = uncompressed(a), uncompressed(b)
    # torch adds a sparse tensor to a dense one, not the other way round [B3].
    return b + a if a.is_sparse and not b.is_sparse else a + b


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one dtype have the same entries; a NaN equals itself."""
    # torch.equal takes NaN for different from NaN: the gradients of an overflow are all NaN.
    return a.shape == b.shape and (
        torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    )


def dot_leaves(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the real inner product as a 0-dim tensor, in float32 at least; None if one is zero."""
    if a is None or b is None:
        return None
    if distributed.are_aligned(a, b):  # the graph would keep both whole tensors
        from gradkit._core.shard_sum import Shards, shard_sum

        parts = map(distributed.local_part, (a, b))
        return shard_sum(_dot(*parts)[None], Shards([distributed.sharding(a)]))
    return _dot(a, b)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if a.is_complex() != b.is_complex():  # the real one has imaginary parts of zero
        both = common_dtype(a.dtype, b.dtype)
        a, b = a.to(both), b.to(both)
    left, right = real_vector(a), real_vector(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    with without_autocast(left.device), INSIDE:
        return torch.dot(left.to(dtype), right.to(dtype))


# The columns of gradients that are multiplied at a time, as they are copied for it.
_COLUMNS_AT_A_TIME = 1 << 18


def products(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the inner products `[K, K]` of tensors, or rows of a matrix, with their graph."""
    if isinstance(rows, Tensor):
        blocks: Iterable[Tensor] = torch.split(rows, _COLUMNS_AT_A_TIME, 1)
    else:
        parts = (torch.split(row.reshape(-1), _COLUMNS_AT_A_TIME) for row in rows)
        blocks = (torch.stack(to_common_dtype(columns)) for columns in zip(*parts, strict=True))
    total: Tensor | None = None
    for block in blocks:
        with without_autocast(block.device), INSIDE:
            part = block @ block.T
        total = part if total is None else total + part
    return cast("Tensor", total)


def products_of_rows(rows: Tensor) -> Tensor:
    """Return the inner products `[K, K]` of the gradients in a stack `[K, *shape]`."""
    matrix = _as_matrix(rows)
    dtype = common_dtype(matrix.dtype)
    parts = [matrix] if dtype == matrix.dtype else torch.split(matrix, _COLUMNS_AT_A_TIME, 1)
    product = torch.zeros(len(rows), len(rows), dtype=dtype, device=rows.device)
    with without_autocast(rows.device), INSIDE:
        for part in parts:
            columns = part.to(dtype)
            product.addmm_(columns, columns.T)
    return product


def with_zeros(product: Tensor, present: Sequence[int], count: int) -> Tensor:
    """Return the products of all rows, from those of some; what is left is zero."""
    if len(present) == count:
        return product
    # A tensor of indices would let the host wait for its copy to the device.
    for dim in (0, 1):
        lines = dict(zip(present, product.unbind(dim), strict=True))
        zeros = torch.zeros_like(lines[present[0]])
        product = torch.stack([lines.get(row, zeros) for row in range(count)], dim)
    return product


def symmetrized(product: Tensor) -> Tensor:
    """Return the upper triangle in both halves: a product of matrices may round asymmetrically."""
    return product.triu() + product.triu(1).T


def clip_factor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return what `clip_grad_norm_` multiplies gradients of a norm with."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def norms_of_rows(rows: Tensor) -> Tensor:
    """Return the Euclidean norms of the gradients in a stack `[K, *shape]`, as `[K]`."""
    matrix = _as_matrix(rows)
    dtype = common_dtype(matrix.dtype)
    if matrix.dtype.itemsize == 1:  # torch has no norm of float8
        matrix = matrix.to(dtype)
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=dtype)
    return norms


def _as_matrix(rows: Tensor) -> Tensor:
    """Return the entries of each gradient in the order of its memory, which needs no copy."""
    dims = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)
    rows = rows.permute(0, *dims)
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows.reshape(len(rows), rows[0].numel())


def real_vector(leaf: Tensor) -> Tensor:
    """Return the leaf as a real vector, in float32 at least; a complex number is two entries."""
    # A shard alone does not align with those of other gradients.
    flat = dense(distributed.full_tensor(leaf)).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.to(common_dtype(flat.dtype))


def stored_values(leaf: Tensor) -> Tensor:
    """Return the entries of a leaf as a dense tensor; of a sparse one, those that it stores."""
    if leaf.is_sparse:
        return leaf.coalesce().values()
    return dense(leaf)


def dense(leaf: Tensor) -> Tensor:
    """Return the entries of a leaf as a dense tensor: in its shape, or of a nested one in a row."""
    if leaf.is_nested:  # the rows one after the other; a jagged tensor may hold others between
        return torch.cat([row.reshape(-1) for row in leaf.unbind()])
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


def refuse_meta(leaves: Sequence[Tensor | None], path: Callable[[int], str]) -> None:
    """Raise if a leaf, whose numbers are to be read, has none, or those of a transform."""
    for index, leaf in enumerate(leaves):
        if leaf is not None and leaf.is_meta:
            fix = 'give it memory, and load it: model.to_empty(device="cpu")'
            raise LeafTypeError(message(path(index), "a tensor with values", describe(leaf), fix))
        if leaf is not None and is_transform_tensor(leaf):
            expected, fix = "a tensor outside of torch.func's transforms", "return it first"
            raise UnsupportedGraphError(message(path(index), expected, "one inside of them", fix))


def largest(leaves: Sequence[Tensor | None]) -> Tensor:
    """Return the largest magnitude of an entry, as a constant; 0-dim, in the common dtype."""
    entries = (stored_values(distributed.full_tensor(x.detach())) for x in leaves if x is not None)
    maxima = [x.abs().max() for x in entries if x.numel()]
    return torch.stack(to_common_dtype(maxima)).max() if maxima else torch.zeros(())


def to_common_dtype(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts on the device of the first, in their common dtype: float32 at least."""
    dtype = common_dtype(*(part.dtype for part in parts))
    return [part.to(parts[0].device, dtype) for part in parts]


def from_real_vector(flat: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `real_vector`: a leaf with the shape and dtype of `like`."""
    if like.is_complex():
        flat = torch.complex(flat[::2], flat[1::2])  # view_as_complex wants an even offset
    if like.is_nested:
        return jagged_like(flat.reshape(like.values().shape).to(like.dtype), like)
    leaf = flat.reshape(like.shape).to(like.dtype)
    return distributed.sharded_like(leaf, like) if distributed.is_dtensor(like) else leaf


def jagged_like(values: Tensor, like: Tensor) -> Tensor:
    """Return a jagged tensor of these values, in rows of the same lengths as those of another."""
    make = torch.nested.nested_tensor_from_jagged
    return make(values, like.offsets(), like.lengths(), jagged_dim=like._ragged_idx)  # type: ignore[attr-defined]
