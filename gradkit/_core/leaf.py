"""Arithmetic on one leaf of a tree of gradients; None is zero."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b in new memory. Sparse plus sparse stays sparse, else the sum is dense."""
    if a is None or b is None:
        present = b if a is None else a
        return None if present is None else present.clone()
    # torch adds a sparse tensor to a dense one, not the other way round [B3].
    return b + a if a.is_sparse and not b.is_sparse else a + b


def inner(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the real inner product as a 0-dim tensor, in float32 at least; None if one is zero."""
    if a is None or b is None:
        return None
    left, right = real_vector(a), real_vector(b)
    dtype = torch.promote_types(left.dtype, right.dtype)
    with torch.autocast(left.device.type, enabled=False):  # which would compute in half precision
        return torch.dot(left.to(dtype), right.to(dtype))


def is_dtensor(leaf: object) -> bool:
    """Return whether this is the shard of a tensor that several processes hold."""
    # Looked up, not imported: a process that has not imported it has no such tensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def whole(leaf: Tensor) -> Tensor:
    """Return the whole tensor of which each process holds a shard; a collective then.

    To `item()` and `bool()`, a DTensor that is yet to be summed over its ranks says what this rank
    adds; and one that has an empty shard has no maximum on that rank, while the others wait [M8].
    """
    if not is_dtensor(leaf):
        return leaf
    sharded: Any = leaf
    return cast("Tensor", sharded.full_tensor())


def real_vector(leaf: Tensor) -> Tensor:
    """Return the leaf as a real vector, in float32 at least; a complex number is two entries."""
    # A shard by itself has no place among the shards of other losses' gradients.
    leaf = whole(leaf)
    dense = leaf.to_dense() if leaf.layout != torch.strided else leaf
    flat = dense.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))


def stored(leaf: Tensor) -> Tensor:
    """Return the numbers of a leaf as one dense tensor; of a sparse one, those that it has."""
    if leaf.is_sparse:
        return leaf.coalesce().values()
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


def largest(leaves: Sequence[Tensor | None]) -> Tensor:
    """Return the largest magnitude of an entry, as a constant; 0-dim, in float32 at least."""
    numbers = (stored(whole(x.detach())) for x in leaves if x is not None)
    tops = [x.abs().max() for x in numbers if x.numel()]
    if not tops:
        return torch.zeros(())
    top = torch.stack([top.to(tops[0].device, torch.float64) for top in tops]).max()
    return top.to(torch.promote_types(tops[0].dtype, torch.float32))


def common_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that holds the numbers of all parts: float32 at least."""
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return dtype


def width(leaf: Tensor) -> int:
    """Return the length of `real_vector(leaf)`."""
    return leaf.numel() * (2 if leaf.is_complex() else 1)


def from_real_vector(flat: Tensor, like: Tensor) -> Tensor:
    """Return the leaf of which `flat` is the `real_vector`, in the shape and dtype of `like`."""
    if like.is_complex():
        flat = torch.view_as_complex(flat.reshape(-1, 2))
    leaf = flat.reshape(like.shape).to(like.dtype)
    return _sharded_as(leaf, like) if is_dtensor(like) else leaf


def _sharded_as(leaf: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    same = DTensor.from_local(leaf, like.device_mesh, everywhere, run_check=False)
    # What is yet to be summed over ranks is whole here: it would count once for each of them.
    placements = [Replicate() if one.is_partial() else one for one in like.placements]
    return same.redistribute(placements=placements)
