"""The sum over shards of a number that each rank computes from its own, to any order.

Apart, and imported where there are shards: each Function that is defined costs every call a look.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from gradkit._compat.distributed import sum_over_shards


def shard_sum(part: Tensor, sharded_as: Hashable) -> Tensor:
    """Return the sum of what ranks have computed from their parts, differentiable."""
    if not part.requires_grad:
        return sum_over_shards(part, sharded_as)
    return _AcrossShards.apply(part, sharded_as, True)  # type: ignore[no-untyped-call,no-any-return]


# The sum is the same on all ranks, and so is its cotangent, which each rank gives to its own part.
# The derivative of that is a sum again: torch's, of `DTensor.full_tensor`, leaves it out.
class _AcrossShards(Function):
    """The sum over the shards, on every rank; or, not `summed`, such a number for each part."""

    @staticmethod
    def forward(value: Tensor, sharded_as: Hashable, summed: bool) -> Tensor:
        if not summed:
            return value.clone()
        return sum_over_shards(value.detach(), sharded_as)  # torch warns of one that requires grad

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        _, ctx.sharded_as, ctx.summed = inputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        if ctx.summed:
            return _AcrossShards.apply(cotangent, ctx.sharded_as, False), None, None  # type: ignore[no-untyped-call]
        return shard_sum(cotangent, ctx.sharded_as), None, None
