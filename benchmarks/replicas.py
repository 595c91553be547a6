"""Modules under DistributedDataParallel, and the methods for their reduced gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradkit
from benchmarks import models
from benchmarks.harness import Side
from benchmarks.heads import Size

DDP = "DDP: backward, step"
PASSES = "DDP: forward and backward a loss"
LOOP = "autograd.grad in a loop, one all_reduce"
_RATE = 1e-6
Rows: TypeAlias = Sequence[Sequence[Tensor]]  # gradients by loss and parameter


@contextmanager
def group(rank: int, ranks: int, rendezvous: str) -> Iterator[None]:
    """Be a rank of a group over gloo for the block."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def step_sides(width: int, depth: int, batch: int) -> dict[str, Side]:
    """Return the methods for a step of SGD with momentum; the forward pass is not timed."""
    model = DistributedDataParallel(models.mlp(width, depth))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)

    def build() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(batch, width)).square().mean()
        dist.barrier()  # so that no rank waits while another builds
        return loss

    def ours(loss: Tensor) -> None:
        _, grads = gradkit.distributed.value_and_grads(loss, model)
        gradkit.step_(optimizer, model, grads)

    def raw(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return {"gradkit": Side(build, ours), DDP: Side(build, raw)}


class Heads(nn.Module):
    """Heads of one output on a trunk, with a loss each."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.trunk = models.mlp(size.width, size.depth)
        self.heads = nn.ModuleList(nn.Linear(size.width, 1) for _ in range(size.count))

    def forward(self, x: Tensor, only: int | None = None) -> list[Tensor]:
        """Return a loss for each head, or for one only."""
        features = self.trunk(x)
        heads = self.heads if only is None else [self.heads[only]]
        return [head(features).square().mean() for head in heads]


def per_loss_sides(size: Size) -> dict[str, Side]:
    """Return the methods for the gradient of each loss, forward pass included."""
    # A loss does not reach the heads of the others, and a model can be wrapped once only.
    waiting = DistributedDataParallel(_heads(size), find_unused_parameters=True)
    model = DistributedDataParallel(_heads(size))

    def build() -> Tensor:
        x = torch.randn(size.batch, size.width)
        dist.barrier()
        return x

    def ours(x: Tensor) -> object:
        return gradkit.distributed.per_loss_grads(model(x), model)

    def passes(x: Tensor) -> Rows:
        return [_one_pass(waiting, x, index) for index in range(size.count)]

    def loop(x: Tensor) -> Rows:
        return _reduced(model(x), list(model.parameters()))

    return {"gradkit": Side(build, ours), PASSES: Side(build, passes), LOOP: Side(build, loop)}


def _heads(size: Size) -> Heads:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Heads(size)


def _one_pass(model: nn.Module, x: Tensor, index: int) -> list[Tensor]:
    model.zero_grad()
    model(x, index)[0].backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _reduced(losses: list[Tensor], params: list[Tensor]) -> Rows:
    last = len(losses) - 1
    rows = [
        torch.autograd.grad(
            loss, params, retain_graph=index < last, allow_unused=True, materialize_grads=True
        )
        for index, loss in enumerate(losses)
    ]
    flat = torch.cat([grad.reshape(-1) for row in rows for grad in row]) / dist.get_world_size()
    dist.all_reduce(flat)
    parts = iter(torch.split(flat, [grad.numel() for row in rows for grad in row]))
    return [[next(parts).view(param.shape) for param in params] for _ in rows]


def agree(size: Size) -> bool:
    """Return whether all methods give the same gradients, reduced over the ranks."""
    results: list[Tensor] = []
    for side in per_loss_sides(size).values():
        torch.manual_seed(dist.get_rank())
        results.append(_flat(side.run(side.build())))
    return all(torch.allclose(result, results[0], atol=1e-6) for result in results)


def _flat(rows: Any) -> Tensor:
    leaves = [list(row.values()) if isinstance(row, dict) else list(row) for row in rows]
    # None is zero, in the shape of what another loss has there.
    likes = [next(g for g in column if g is not None) for column in zip(*leaves, strict=True)]
    return torch.cat([
        (torch.zeros_like(like) if grad is None else grad).reshape(-1)
        for row in leaves
        for grad, like in zip(row, likes, strict=True)
    ])


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of a block, also those that DDP starts, and the bytes they are given.

    Attributes:
        sent: The bytes of each.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Count a collective, and run it."""
        if func.namespace == "c10d":
            mine = args[1] if "allgather" in func.name() else args[0]  # after the output tensors
            tensors = [leaf for leaf in tree_leaves(mine) if isinstance(leaf, Tensor)]
            self.sent.append(sum(t.numel() * t.element_size() for t in tensors))
        return func(*args, **(kwargs or {}))


def collectives(side: Side) -> list[int]:
    """Return the bytes of each collective of one call."""
    side.run(side.build())  # DDP arranges its buckets anew after the first pass
    inputs = side.build()
    counted = Collectives()
    with counted:
        side.run(inputs)
    return counted.sent
