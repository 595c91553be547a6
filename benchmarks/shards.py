"""Modules of which each rank has a shard, and the methods for their first and second gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import gradkit
from benchmarks import memory, models, peers
from benchmarks.harness import Side
from benchmarks.memory import Peak
from gradkit._compat.versions import is_mended

FSDP = "fully_shard, backward"
UNSHARDED = "create_graph on the whole parameters"
STEP, PENALTY, META = "loss and gradients", "gradient penalty", "meta-gradient, 1 step of SGD"
_RATE, _WEIGHT = 0.1, 0.1
Grads: TypeAlias = Mapping[str, Any]
_Make: TypeAlias = Callable[["Sharded"], Callable[[Tensor], Grads]]


@dataclass(frozen=True, slots=True)
class Net:
    """An MLP whose layers are sharded one by one.

    Attributes:
        width: Of each layer; a multiple of the number of ranks.
        depth: How many layers.
        batch: Samples on each rank.
    """

    width: int
    depth: int
    batch: int

    def __str__(self) -> str:
        return f"W{self.width} D{self.depth} B{self.batch}"


class Sharded:
    """A module that `fully_shard` has sharded, and the same as a function of these shards."""

    def __init__(self, net: Net, dtype: torch.dtype) -> None:
        # Not above: where DTensor is imported, calls in other rooms would look for it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.net, self.dtype = net, dtype
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same values on all ranks
            self.module = models.mlp(net.width, net.depth).to(dtype)
        for part in (*self.module, self.module):
            if part is self.module or isinstance(part, nn.Linear):
                fully_shard(part, mesh=self.mesh, reshard_after_forward=True)
        call, params, self.buffers = gradkit.distributed.make_functional(self.module, self.mesh)
        self._call, self.params = call, params
        self._plain = models.mlp(net.width, net.depth).to("meta")

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's shards."""
        return sum(shard.nbytes for shard in _local(self.params).values())

    def build(self) -> Tensor:
        """Return a fresh batch."""
        dist.barrier()  # so that no rank waits while another builds
        return torch.randn(self.net.batch, self.net.width, dtype=self.dtype)

    def of_module(self, x: Tensor) -> Tensor:
        """Return the loss by the hooks of `fully_shard`."""
        return _loss(self.module(x))

    def of_shards(self, params: Grads, x: Tensor) -> Tensor:
        """Return the loss as a function of shards."""
        return _loss(self._call(params, self.buffers, x)[0])

    def of_whole(self, params: Grads, x: Tensor) -> Tensor:
        """Return the loss as a function of whole parameters."""
        return _loss(functional_call(self._plain, dict(params), (x,)))

    def whole(self) -> dict[str, Any]:
        """Return all parameters, gathered."""
        params: Mapping[str, Any] = self.params
        return {n: p.detach().full_tensor().requires_grad_() for n, p in params.items()}


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _local(tree: Grads) -> dict[str, Tensor]:
    return {name: leaf.to_local() for name, leaf in tree.items()}


def _step(task: Sharded) -> Callable[[Tensor], Grads]:
    def run(x: Tensor) -> Grads:
        _, grads = gradkit.value_and_grads(task.of_shards(task.params, x), task.params)
        return _local(grads)

    return run


def _fsdp_step(task: Sharded) -> Callable[[Tensor], Grads]:
    params: Mapping[str, Any] = dict(task.module.named_parameters())

    def run(x: Tensor) -> Grads:
        task.of_module(x).backward()  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in params.items()}
        task.module.zero_grad()  # before the next call, not in it, where memory is counted
        return _local(grads)

    return run


def _penalty(task: Sharded) -> Callable[[Tensor], Grads]:
    def run(x: Tensor) -> Grads:
        loss = task.of_shards(task.params, x)
        loss, grads = gradkit.value_and_grads(loss, task.params, create_graph=True)
        penalized = loss + _WEIGHT * gradkit.tree.dot(grads, grads)
        del grads
        return _local(gradkit.value_and_grads(penalized, task.params)[1])

    return run


def _whole_penalty(task: Sharded) -> Callable[[Tensor], Grads]:
    def run(x: Tensor) -> Grads:
        params = task.whole()
        loss = task.of_whole(params, x)
        grads = torch.autograd.grad(loss, [*params.values()], create_graph=True)
        penalized = loss + _WEIGHT * sum(_mean(grad).square().sum() for grad in grads)
        del loss, grads
        return _rows(params, torch.autograd.grad(penalized, [*params.values()]))

    return run


def _meta(task: Sharded) -> Callable[[Tensor], Grads]:
    def run(x: Tensor) -> Grads:
        loss = task.of_shards(task.params, x)
        _, grads = gradkit.value_and_grads(loss, task.params, create_graph=True)
        adapted = gradkit.tree.map(lambda p, g: p - _RATE * g, task.params, grads)
        del loss, grads
        loss = task.of_shards(adapted, x)
        del adapted
        return _local(gradkit.value_and_grads(loss, task.params)[1])

    return run


def _whole_meta(task: Sharded) -> Callable[[Tensor], Grads]:
    def run(x: Tensor) -> Grads:
        params = task.whole()
        loss = task.of_whole(params, x)
        grads = torch.autograd.grad(loss, [*params.values()], create_graph=True)
        pairs = zip(params.items(), grads, strict=True)
        adapted = {name: param - _RATE * _mean(grad) for (name, param), grad in pairs}
        del loss, grads
        loss = task.of_whole(adapted, x)
        del adapted
        return _rows(params, torch.autograd.grad(loss, [*params.values()]))

    return run


def _mean(grad: Tensor) -> Tensor:
    """Return the mean over the ranks, with a graph."""
    from torch.distributed.nn.functional import all_reduce

    mean: Tensor = all_reduce(grad) / dist.get_world_size()  # type: ignore[no-untyped-call]
    return mean


def _rows(names: Iterable[str], grads: tuple[Tensor, ...]) -> Grads:
    """Return this rank's rows of the means over the ranks."""
    left, ranks = list(grads), dist.get_world_size()
    del grads
    rows: dict[str, Tensor] = {}
    for name in names:
        grad = left.pop(0)
        own = rows[name] = grad.new_empty(len(grad) // ranks, *grad.shape[1:])
        dist.reduce_scatter(own, list(grad.chunk(ranks)))
        own /= ranks
    return rows


# Each call by the name of its method; the method of gradkit first.
CALLS: dict[str, dict[str, _Make]] = {
    STEP: {"gradkit": _step, FSDP: _fsdp_step},
    PENALTY: {"gradkit": _penalty, UNSHARDED: _whole_penalty},
    META: {"gradkit": _meta, UNSHARDED: _whole_meta},
}


def calls() -> list[str]:
    """Return the calls to compare: torch 2.11 gets second derivatives over shards wrong."""
    return list(CALLS) if is_mended("DTensor") else [STEP]


def sides(call: str, net: Net, dtype: torch.dtype = torch.float32) -> dict[str, Side]:
    """Return the methods for a call, on the shards of one module."""
    task = Sharded(net, dtype)
    return {name: Side(task.build, make(task)) for name, make in CALLS[call].items()}


def agree(call: str, net: Net) -> bool:
    """Return, the same on all ranks, whether both methods for a call give the same gradients."""
    found: list[Grads] = []
    for side in sides(call, net, torch.float64).values():
        torch.manual_seed(dist.get_rank())
        result: Any = side.run(side.build())
        found.append(result)
    ours, theirs = found
    close = peers.close([ours[name] for name in theirs], theirs.values(), rtol=1e-10)
    everywhere = torch.tensor(int(close))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def peaks(call: str, net: Net, tries: int) -> dict[str, dict[str, int]]:
    """Return the peaks of both methods for a call, as plain values."""
    return {name: asdict(_peak(side, tries)) for name, side in sides(call, net).items()}


def _peak(side: Side, tries: int) -> Peak:
    """Return the least peak of several calls: threads of gloo may free a tensor late."""
    side.run(side.build())
    every = [memory.peak(side, torch.device("cpu")) for _ in range(tries)]
    return min(every, key=lambda peak: peak.total)


def parameter_memory(call: str, net: Net, tries: int) -> dict[str, float]:
    """Return the bytes that parameters and what has their size take at the peak, on this rank.

    It is the peak with one sample, of which the activations are a thousandth of a layer's weights,
    and the shards, which stood before: so parameters, gathered copies, gradients of both orders.
    """
    standing = Sharded(net, torch.float32).nbytes
    found = peaks(call, replace(net, batch=1), tries)
    return {name: standing + peak["total"] for name, peak in found.items()}
