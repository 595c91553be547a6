"""Parameters gathered from their shards, and gradients reduced to shards, to any order.

Each rank differentiates a loss of its own, and the total is the mean of these losses. So the
derivative of gathering is the mean over the ranks, scattered to the shards; the derivative of that
mean is gathering.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gradkit._compat.distributed import (
    all_gather_into,
    from_rows,
    has_rows_on,
    is_dtensor,
    local_tensor,
    placement,
    reduce_scatter_into,
    to_rows,
)
from gradkit._state.recomputed_tensors import Recompute, RecomputedTensorSource, refuse_changed
from gradkit.distributed._agreement import Group, collective_errors
from gradkit.distributed._remote_errors import RemoteErrors
from gradkit.errors import StructureError, UnsupportedGraphError, describe, message

if TYPE_CHECKING:  # it would import all of DTensor
    from torch.distributed.device_mesh import DeviceMesh


class CollectiveOrder(RecomputedTensorSource):
    """The collectives that a rank has taken part in since the last call, as a number."""

    # Ranks whose graphs differ could mix up parameters of one shape.

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self._count = self._digest = 0

    def add(self, index: int, kind: int) -> None:
        """Count a collective for a parameter."""
        self._count += 1
        self._digest = hash((self._digest, index, kind))  # of numbers: the same in every process

    def __str__(self) -> str:
        return f"{self._count} gathers and means, of checksum {self._digest % 10**6}"


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """How one parameter is divided over the ranks: its rows, in chunks."""

    name: str
    index: int
    shape: torch.Size
    mesh: DeviceMesh
    group: Group
    order: CollectiveOrder
    remote_errors: RemoteErrors

    @property
    def rows(self) -> int:
        """Return the rows of the first shard; the last ones may have fewer, or none."""
        return -(-self.shape[0] // self.group.size)

    def fits(self, tensor: object) -> bool:
        """Return whether this is a DTensor of the shape, on the mesh, in the placement."""
        return has_rows_on(tensor, self.mesh) and cast("Tensor", tensor).shape == self.shape

    def gather(self, shard: Tensor) -> Tensor:
        """Return the whole parameter; not differentiable."""
        padded = _padded(self.local(shard), self.rows)
        full = padded.new_empty(self.rows * self.group.size, *self.shape[1:])
        self.order.add(self.index, 0)
        with self._collective_errors("the gather"):
            all_gather_into(full, padded, self.group.handle)
        return full if full.shape == self.shape else full[: self.shape[0]]

    def reduce(self, full: Tensor) -> Tensor:
        """Return the mean over the ranks, in shards; not differentiable."""
        factor = 1 / self.group.size
        sum_overflows = full.dtype == torch.float16  # of numbers whose mean does not
        padded = _padded(full * factor if sum_overflows else full, self.rows * self.group.size)
        local = padded.new_empty(self.rows, *self.shape[1:])
        self.order.add(self.index, 1)
        with self._collective_errors("the mean of the gradient"):
            reduce_scatter_into(local, padded, self.group.handle)
        if not sum_overflows:
            local.mul_(factor)  # of the shard: the whole gradient is in memory only once
        begin = min(self.rows * self.group.rank, self.shape[0])
        kept = local[: min(self.rows, self.shape[0] - begin)]
        return from_rows(kept, self.mesh, self.shape)

    def _collective_errors(self, what: str) -> AbstractContextManager[None]:
        what = f"{what} of params[{self.name!r}]"
        return collective_errors(self.group, what=what, remote_errors=self.remote_errors.of_others)

    def local(self, shard: Tensor) -> Tensor:
        """Return the rows of this rank."""
        if not self.fits(shard):
            raise StructureError(self.misfit(shard))
        return local_tensor(shard)

    def misfit(self, tensor: object) -> str:
        """Return the message for a tensor that does not fit."""
        shape = tuple(self.shape)
        expected = f"a DTensor of shape {shape}, Shard(0) on the mesh of make_functional"
        got = placement(tensor) if is_dtensor(tensor) else describe(tensor)
        fix = "tensor.redistribute(placements=[Shard(0)]), or compute it from the params"
        return message(f"params[{self.name!r}]", expected, got, fix)

    def batched(self, what: str) -> str:
        """Return the message for `what` being one for each sample of a vmap."""
        expected = f"{what} that are the same for all samples of torch.func.vmap"
        fix = "a loop over the samples; or vmap inputs and outputs only, not parameters"
        return message(f"params[{self.name!r}]", expected, "others for each sample", fix)

    def recompute(self, shard: Tensor) -> Recompute:
        """Return a function that gathers again what `gather` returns for this shard."""
        # The version is that of the DTensor: torch does not count what it writes on local tensors.
        return partial(self._again, shard.detach(), shard._version)

    def _again(self, shard: Tensor, version: int) -> Tensor:
        if shard._version != version:
            refuse_changed("the parameter", f"params[{self.name!r}]")
        return self.gather(shard)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded


class Gather(torch.autograd.Function):
    """The whole parameter, on every rank."""

    @staticmethod
    def forward(shard: Tensor, param: ShardedParam) -> Tensor:
        return param.gather(shard)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.param = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (cotangent,) = cotangents
        return None if cotangent is None else _apply(ReduceScatter, cotangent, ctx.param), None

    @staticmethod
    def vmap(_: Any, in_dims: Sequence[int | None], shard: Tensor, param: ShardedParam) -> Any:
        if in_dims[0] is not None:
            raise UnsupportedGraphError(param.batched("params"))
        return gather(shard, param), None  # the same for all samples


class ReduceScatter(torch.autograd.Function):
    """The mean over the ranks, in shards."""

    @staticmethod
    def forward(full: Tensor, param: ShardedParam) -> Tensor:
        return param.reduce(full)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.param = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None
        # That of a sum over all rows, say, is replicated.
        return _apply(Gather, to_rows(cotangent), ctx.param), None

    @staticmethod
    def vmap(_: Any, in_dims: Sequence[int | None], full: Tensor, param: ShardedParam) -> Any:
        raise UnsupportedGraphError(param.batched("gradients"))


def _apply(function: Any, tensor: Tensor, param: ShardedParam) -> Tensor:
    return cast("Tensor", function.apply(tensor, param))


def gather(shard: Tensor, param: ShardedParam) -> Tensor:
    """Return the whole parameter, differentiable."""
    return _apply(Gather, shard, param)
