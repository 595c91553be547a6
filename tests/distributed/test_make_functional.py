"""`distributed.make_functional`: derivatives of any order over shards are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit.distributed import _gather
from tests.processes import Ranks

Tree = dict[str, Any]
make_functional = gradkit.distributed.make_functional


class Net(nn.Module):
    """Rows that no number of ranks divides; a tied, a frozen and a shared-by-hand weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.GroupNorm(1, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(5, 1)  # one row: all other ranks have none
        self.shift = nn.Parameter(torch.full((3, 5), 0.1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        x = self.norm(self.first(x)).tanh() + self.shift.mean(0)
        x = self.tied(self.frozen(x)).tanh() @ self.frozen.weight  # of a part, read by the whole
        out: Tensor = self.last(x)
        return out


def net(device: torch.device) -> Net:
    torch.manual_seed(1)
    return Net().to(device, torch.float64)


def mesh_of(device: torch.device) -> Any:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def batches(device: torch.device, count: int = 3) -> Tensor:
    """Return the data of every rank, `[count, ranks, 4, 5]`."""
    generator = torch.Generator().manual_seed(3)
    shape = (count, dist.get_world_size(), 4, 5)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def assert_close(ours: Any, expected: Any) -> None:
    """Compare trees; those of shards are gathered."""
    if isinstance(expected, dict):
        assert list(ours) == list(expected)
        for key in expected:
            assert_close(ours[key], expected[key])
    elif expected is None:
        assert ours is None
    else:
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Sharded:
    """Losses of this rank over sharded parameters."""

    def __init__(self, module: nn.Module, device: torch.device, **options: Any) -> None:
        self.call, self.params, self.buffers = make_functional(module, mesh_of(device), **options)

    def loss(self, params: Tree, batch: Tensor) -> Tensor:
        out: Tensor = self.call(params, self.buffers, batch[dist.get_rank()])[0]
        return out.square().mean()


class Single:
    """The same in one process on the batches of all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self.call, self.params, self.buffers = gradkit.func.make_functional(module)

    def loss(self, params: Tree, batch: Tensor) -> Tensor:
        outs = [self.call(params, self.buffers, part)[0] for part in batch]
        return torch.stack([out.square().mean() for out in outs]).mean()


def grads_of(loss: Tensor, params: Tree) -> Tree:
    grads: Tree = gradkit.value_and_grads(loss, params, create_graph=True)[1]
    return grads


def square(grads: Tree) -> Tensor:
    return gradkit.tree.dot(grads, grads)


def first_order(run: Any, batch: Tensor) -> Tree:
    losses = {"a": run.loss(run.params, batch[0]), "b": run.loss(run.params, batch[1])}
    return gradkit.per_loss_grads(losses, run.params)  # type: ignore[no-any-return]


def penalty(run: Any, batch: Tensor) -> Tree:
    loss = run.loss(run.params, batch[0])
    grads = grads_of(loss, run.params)
    total: Tree = gradkit.value_and_grads(loss + square(grads), run.params)[1]
    return total


def third_order(run: Any, batch: Tensor) -> Tree:
    first = grads_of(run.loss(run.params, batch[0]), run.params)
    second = grads_of(square(first), run.params)
    third: Tree = gradkit.value_and_grads(square(second), run.params)[1]
    return third


def inner_step(run: Any, batch: Tensor) -> Tree:
    grads = grads_of(run.loss(run.params, batch[0]), run.params)
    adapted = gradkit.tree.sub(run.params, gradkit.tree.scale(grads, 0.1))
    return gradkit.value_and_grads(run.loss(adapted, batch[1]), run.params)[1]  # type: ignore[no-any-return]


def product(run: Any, batch: Tensor) -> Tree:
    """A Hessian product, from eager passes."""
    grads = grads_of(run.loss(run.params, batch[0]), run.params)
    along = gradkit.tree.dot(grads, {name: p.detach() for name, p in run.params.items()})
    return gradkit.value_and_grads(along, run.params)[1]  # type: ignore[no-any-return]


def trained(run: Any) -> Tree:
    return {name: p for name, p in run.params.items() if p.requires_grad}


def func_product(run: Any, batch: Tensor) -> Tree:
    rest = {name: p for name, p in run.params.items() if not p.requires_grad}

    def loss(params: Tree) -> Tensor:
        return run.loss({name: {**params, **rest}[name] for name in run.params}, batch[0])

    along = {name: p.detach() for name, p in trained(run).items()}
    grads, hv = gradkit.func.hvp(loss, trained(run), along, mode="reverse-over-reverse")
    return {"grads": grads, "hv": hv}


def unrolled(memory: Any) -> Callable[[Any, Tensor], Tree]:
    def run_unroll(run: Any, batch: Tensor) -> Tree:
        opt = gradkit.meta.sgd(lr=0.1, momentum=0.9)
        adapted = gradkit.meta.unroll(
            lambda params, _, part: run.loss(params, part), run.params, [*batch[:2]], opt, memory=memory
        )
        loss = run.loss(adapted.params, batch[2])
        return gradkit.value_and_grads(loss, run.params)[1]  # type: ignore[no-any-return]

    return run_unroll


LAWS: dict[str, Callable[[Any, Tensor], Tree]] = {
    "first": first_order,
    "penalty": penalty,
    "third": third_order,
    "inner step": inner_step,
    "product": product,
    "func": func_product,
    "store": unrolled("store"),
    "recompute": unrolled("recompute"),
}


def check_laws(device: torch.device) -> None:
    run, single, batch = Sharded(net(device), device), Single(net(device)), batches(device)
    for name, law in LAWS.items():
        try:
            assert_close(law(run, batch), law(single, batch))
        except Exception as error:
            error.add_note(f"law: {name}")
            raise


def test_every_order_is_that_of_one_process(several: Ranks, device: torch.device) -> None:
    several.run(check_laws)
