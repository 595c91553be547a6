"""The sum over shards of a number that each rank computes from its own, to any order.

Apart, and imported where there are shards: each Function that is defined costs every call a look.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from gradkit._compat.distributed import sum_over_shards


def shard_sum(part: Tensor, sharded_as: Hashable) -> Tensor:
    """Return the sum of what ranks have computed from their parts, differentiable."""
    if not part.requires_grad:
        return sum_over_shards(part, sharded_as)
    return cast("Tensor", _ShardSum.apply(part, sharded_as))  # type: ignore[no-untyped-call]


# The sum is the same on all ranks, and so is its cotangent, which each rank gives to its own part.
# The derivative of that is a sum again: torch's, of `DTensor.full_tensor`, leaves it out.
class _ShardSum(Function):
    """The sum over the shards, on every rank."""

    @staticmethod
    def forward(part: Tensor, sharded_as: Hashable) -> Tensor:
        return sum_over_shards(part.detach(), sharded_as)  # torch warns of one that requires grad

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.sharded_as = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        return _OnEachShard.apply(cotangent, ctx.sharded_as), None  # type: ignore[no-untyped-call]


class _OnEachShard(Function):
    """A number that is the same on all ranks, for the part of each of them."""

    @staticmethod
    def forward(total: Tensor, sharded_as: Hashable) -> Tensor:
        return total.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.sharded_as = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        return shard_sum(cotangent, ctx.sharded_as), None
