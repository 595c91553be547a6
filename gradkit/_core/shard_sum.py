"""What each rank computes from its parts of tensors, put together to numbers of the whole tensors.

Apart, and imported where there are shards: each Function that is defined costs every call a look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from gradkit._compat.distributed import (
    groups_of_mesh,
    has_rank,
    local_part,
    ranks_of,
    root_mesh,
    sharding,
    whole_sums,
)
from gradkit._core.leaf_arithmetic import norms_of_rows
from gradkit.errors import StructureError, message

_SUM = dist.ReduceOp.SUM


class Shards:
    """How the parts of tensors on the ranks add up, each entry once: by the tensors' `sharding`s.

    The parts of a DTensor add up over its mesh; those of a slice over the slice, as other slices of
    its mesh have copies. Beside one of all ranks, those of a mesh of some add up over all ranks.
    """

    def __init__(self, shardings: Iterable[Any]) -> None:
        shardings = [*shardings]
        roots = {of[0]: root_mesh(of[0]) for of in shardings if of is not None}
        several = len(set(roots.values())) > 1
        ranks = {mesh: ranks_of(root) if several else () for mesh, root in roots.items()}
        every = tuple(sorted(set().union(*ranks.values())))
        inner = {mesh for mesh in roots if ranks[mesh] != every}
        for mesh, root in roots.items():
            are_all = len(every) == dist.get_world_size() and mesh is root
            if not (are_all if mesh in inner else has_rank(mesh)):
                seen = f"seen from rank {dist.get_rank()}, with none over all ranks beside it"
                _refuse(f"one over the ranks {[*ranks_of(mesh)]}, {seen}", _ON_THESE)
        all_ranks = (dist.group.WORLD,)
        self._groups: list[Any] = [
            () if of is None else all_ranks if of[0] in inner else groups_of_mesh(of[0])
            for of in shardings
        ]
        self.count = len(shardings)
        self._counts = [of is None or _counts(*of) for of in shardings]
        meshes = sorted(ranks[mesh] for mesh in inner)
        self._mark = 1 + (crc32(repr(meshes).encode()) & 0xFFFFF) if inner else 0

    def combined(self, rows: Tensor, op: Any = _SUM) -> Tensor:
        """Return sums, or another `op`, over the ranks of a row of numbers for each tensor."""
        rows = rows.double()
        result = list(rows)
        mark, zero = self._mark, rows.new_zeros(rows.shape[1:])
        for groups in filter(None, dict.fromkeys(self._groups)):
            indices = [index for index, of in enumerate(self._groups) if of == groups]
            own = torch.stack([result[i] if self._counts[i] else zero for i in indices])
            marks = [rows.new_full((1,), number) for number in (mark > 0, mark, mark**2)]
            flat = torch.cat([own.reshape(-1), *marks])
            for group in groups:
                dist.all_reduce(flat, op, group=group)
            if mark and op == _SUM:
                count, total, squares = flat[-3:].tolist()
                if count * squares != total**2:  # the ranks that have such meshes have others
                    _refuse("one over these ranks, another one over others: copies or not", _ON_ALL)
            for index, row in zip(indices, flat[:-3].reshape(own.shape), strict=True):
                result[index] = row
        return torch.stack(result)


def _counts(mesh: Any, placements: Sequence[Any]) -> bool:
    """Return whether this rank's part is one that counts: the first of those that are the same."""
    own = mesh.get_coordinate()
    return own is not None and not any(
        at > 0 and (p.is_replicate() or p.is_partial())  # whose sum all have, when it counts
        for at, p in zip(own, placements, strict=True)
    )


_ON_THESE = "make the call on these ranks alone, or slice all meshes from one init_device_mesh"
_ON_ALL = "give each rank the DTensors of both; or slice the meshes of copies from one"


def _refuse(got: str, fix: str) -> None:
    raise StructureError(message("tree", "DTensors of which each entry can count once", got, fix))


def norm_over_shards(leaves: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors, each entry counted once, differentiable to any order."""
    shards = Shards(map(sharding, leaves))
    norms = [norms_of_rows(local_part(whole_sums(leaf))[None]) for leaf in leaves]
    squares = torch.cat([norm.to(norms[0].device, torch.float64).square() for norm in norms])
    total = shard_sum(squares, shards)
    is_zero = total == 0  # the square root has no derivative there
    norm = torch.where(is_zero, total, torch.where(is_zero, 1.0, total).sqrt())
    return norm.to(reduce(torch.promote_types, (leaf.dtype for leaf in leaves)).to_real())


def shard_sum(parts: Tensor, shards: Shards) -> Tensor:
    """Return the sum of what ranks have computed from their parts of tensors, differentiable."""
    if not parts.requires_grad:
        return shards.combined(parts).sum(0).to(parts.dtype)
    return _AcrossShards.apply(parts, shards, True)  # type: ignore[no-untyped-call,no-any-return]


# The sum is the same on all ranks, and so is its cotangent, which each rank gives to its own parts.
# The derivative of that is a sum again: torch's, of `DTensor.full_tensor`, leaves it out.
class _AcrossShards(Function):
    """The sum over tensors and shards, on every rank; or, not `summed`, a number for each part."""

    @staticmethod
    def forward(value: Tensor, shards: Shards, summed: bool) -> Tensor:
        if not summed:
            return value.expand(shards.count).clone()
        return shard_sum(value.detach(), shards)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        _, ctx.shards, ctx.summed = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        if ctx.summed:
            return _AcrossShards.apply(cotangent, ctx.shards, False), None, None  # type: ignore[no-untyped-call]
        return shard_sum(cotangent, ctx.shards), None, None
