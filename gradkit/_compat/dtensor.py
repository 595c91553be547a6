"""DTensors: tensors of which each process holds a shard. Run on torch 2.13."""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor


def is_dtensor(leaf: object) -> bool:
    """Return whether this is a DTensor."""
    # Looked up, not imported: a process that has not imported it has no such tensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, module.DTensor)


def full_tensor(leaf: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor, which is a collective; any other tensor as it is.

    To `item()` and `bool()`, a DTensor that is still to be summed over its ranks is this rank's
    part; and the maximum of one with an empty shard fails on that rank while the others wait [M8].
    """
    if not is_dtensor(leaf):
        return leaf
    sharded: Any = leaf
    return cast("Tensor", sharded.full_tensor())


def sharded_like(leaf: Tensor, like: Any) -> Tensor:
    """Return a tensor, which is the same on all ranks, with the mesh and shards of a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * like.device_mesh.ndim
    same = DTensor.from_local(leaf, like.device_mesh, replicated, run_check=False)
    # The leaf is the sum over ranks already: as a partial sum it would count once for each of them.
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    return same.redistribute(placements=placements)
