"""What each rank computes from its parts of tensors, put together to numbers of the whole tensors.

Apart, and imported where there are shards: each Function that is defined costs every call a look.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from gradkit._compat.distributed import (
    group_of_all,
    groups_of_mesh,
    is_copy,
    local_part,
    mesh_of,
    placement,
    ranks_of,
    root_mesh,
    whole_sums,
)
from gradkit.errors import LeafTypeError, StructureError, message

_SUM = dist.ReduceOp.SUM


class Shards:
    """Over which ranks the parts of tensors are put together, so that each entry counts once.

    Attributes:
        groups: For each tensor the process groups, one after the other; none for a plain tensor.
        counts: Whether this rank's part counts: that of one of the ranks which have the same.
        surrounded: A checksum of the meshes with only some of the ranks of another one; or 0.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        meshes = dict.fromkeys(leaf for leaf in map(mesh_of, leaves) if leaf is not None)
        roots = {mesh: root_mesh(mesh) for mesh in meshes}
        several = len(set(roots.values())) > 1
        ranks = {mesh: ranks_of(root) if several else () for mesh, root in roots.items()}
        every = tuple(sorted(set().union(*ranks.values())))
        outer = group_of_all(len(every))
        self.groups: list[tuple[Any, ...]] = []
        self.counts: list[bool] = []
        for leaf in leaves:
            mesh: Any = mesh_of(leaf)
            if mesh is None:
                self.groups.append(())
                self.counts.append(True)
                continue
            inside = ranks[mesh] != every
            own = mesh.get_coordinate()
            if not outer if inside else own is None:
                _refuse_foreign(leaf)
            # All slices of a mesh have copies: the one with its first rank counts.
            is_first = not inside or ranks[mesh][0] in ranks_of(mesh)
            self.groups.append(outer if inside else groups_of_mesh(mesh))
            self.counts.append(own is not None and is_first and not is_copy(leaf, own))
        of_some = sorted({ranks[mesh] for mesh in meshes if ranks[mesh] != every})
        self.surrounded = 1 + (crc32(repr(of_some).encode()) & 0xFFFFF) if of_some else 0

    def total(self, parts: Tensor) -> Tensor:
        """Return the sum of numbers, one for each tensor, over tensors and ranks."""
        # Over tensors first: a rank may leave out a tensor of which it has no part.
        sums = [self._all_reduced(rows.sum(), of) for of, (_, rows) in self._grouped(parts).items()]
        return reduce(torch.add, sums).to(parts.dtype)

    def each(self, rows: Tensor, op: Any = _SUM) -> Tensor:
        """Return the sums, or another `op`, of a row of numbers for each tensor, over the ranks."""
        result = list(rows)
        for groups, (indices, own) in self._grouped(rows).items():
            for index, row in zip(indices, self._all_reduced(own, groups, op), strict=True):
                result[index] = row
        return torch.stack(result)

    def _grouped(self, rows: Tensor) -> dict[tuple[Any, ...], tuple[list[int], Tensor]]:
        """Return by group the indices of tensors, and their rows: zero where others count."""
        indices: dict[tuple[Any, ...], list[int]] = {}
        for index, groups in enumerate(self.groups):
            indices.setdefault(groups, []).append(index)
        counted = [
            row if counts else torch.zeros_like(row)
            for row, counts in zip(rows, self.counts, strict=True)
        ]
        return {of: (some, torch.stack([counted[i] for i in some])) for of, some in indices.items()}

    def _all_reduced(self, values: Tensor, groups: tuple[Any, ...], op: Any = _SUM) -> Tensor:
        """Return numbers put together over the ranks of groups, in float64: a collective of all."""
        if not groups:
            return values.double()
        mark = self.surrounded
        marks = [values.new_full((1,), x, dtype=torch.float64) for x in (bool(mark), mark, mark**2)]
        flat = torch.cat([values.double().reshape(-1), *marks])
        for group in groups:
            dist.all_reduce(flat, op, group=group)
        if mark and op == _SUM:
            count, total, squares = flat[-3:].tolist()
            if count * squares != total**2:  # the marks of the ranks that have one are not equal
                _refuse_unlike()
        return flat[:-3].reshape(values.shape)


def _refuse_foreign(leaf: Any) -> None:
    expected = "DTensors of meshes that this rank is in, or beside one whose mesh has all the ranks"
    fix = "make the call on the ranks of the mesh; or slice all meshes from one init_device_mesh"
    raise LeafTypeError(message("a leaf", expected, placement(leaf), fix))


def _refuse_unlike() -> None:
    expected = "on every rank the DTensors of the same meshes, as each entry counts once"
    got = "other meshes on other ranks, which may be copies or not"
    fix = (
        "slice the meshes of copies from one init_device_mesh; of tensors that are no copies, give "
        "every rank the DTensors of all meshes"
    )
    raise StructureError(message("tree", expected, got, fix))


def norm_over_shards(leaves: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors, each entry counted once, differentiable to any order."""
    shards = Shards(leaves)
    halves = (torch.float16, torch.bfloat16)
    norms = [
        torch.linalg.vector_norm(x, dtype=torch.float32 if x.dtype in halves else None)
        for x in (local_part(whole_sums(leaf)) for leaf in leaves)
    ]
    device = norms[0].device
    squares = torch.stack([norm.to(device, torch.float64).square() for norm in norms])
    total = shard_sum(squares, shards)
    is_zero = total == 0  # where the square root has no derivative
    norm = torch.where(is_zero, total, torch.where(is_zero, 1.0, total).sqrt())
    return norm.to(reduce(torch.promote_types, (leaf.dtype for leaf in leaves)).to_real())


def shard_sum(parts: Tensor, shards: Shards) -> Tensor:
    """Return the sum of what ranks have computed from their parts of tensors, differentiable."""
    if not parts.requires_grad:
        return shards.total(parts)
    return _AcrossShards.apply(parts, shards, True)  # type: ignore[no-untyped-call,no-any-return]


# The sum is the same on all ranks, and so is its cotangent, which each rank gives to its own parts.
# The derivative of that is a sum again: torch's, of `DTensor.full_tensor`, leaves it out.
class _AcrossShards(Function):
    """The sum over tensors and shards, on every rank; or, not `summed`, a number for each part."""

    @staticmethod
    def forward(value: Tensor, shards: Shards, summed: bool) -> Tensor:
        if not summed:
            return value.expand(len(shards.counts)).clone()
        return shards.total(value.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        _, ctx.shards, ctx.summed = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        if ctx.summed:
            return _AcrossShards.apply(cotangent, ctx.shards, False), None, None  # type: ignore[no-untyped-call]
        return shard_sum(cotangent, ctx.shards), None, None
