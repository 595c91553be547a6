"""The tasks of a meta-batch, divided over processes, are one batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradkit
from tests.processes import Ranks

OPT = gradkit.meta.sgd(lr=0.1)


def meta_loss(params: Any, task: Any) -> tuple[Tensor, Tensor]:
    x, y = task

    def loss(params: Any, _: Any, data: Any) -> Tensor:
        return ((data[0] @ params["w"]).tanh() - data[1]).square().mean() + params["b"] ** 2

    adapted = gradkit.meta.unroll(loss, params, [(x, y)] * 2, OPT)
    return loss(adapted.params, None, (x + 1, y)), adapted.params["b"]


def check_tasks(device: torch.device) -> None:
    """Rank 0 has one task, rank 1 has two, and so on: the mean is over tasks, not over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    counts = [*range(1, size + 1)]
    x, y = (
        torch.randn(sum(counts), *shape, generator=generator, dtype=torch.float64).to(device)
        for shape in ((4, 3), (4,))
    )
    params = {"w": torch.ones(3), "b": torch.tensor(0.5)}
    params = {name: p.to(device, torch.float64).requires_grad_() for name, p in params.items()}
    run = gradkit.meta.mean_value_and_grads
    (value, aux), grads = run(meta_loss, params, (x, y), has_aux=True)
    begin = sum(counts[:rank])
    own = slice(begin, begin + counts[rank])
    world = dist.group.WORLD
    (ours, our_aux), our_grads = run(
        meta_loss, params, (x[own], y[own]), has_aux=True, group=world, tasks_at_once=1
    )
    torch.testing.assert_close(ours, value, rtol=0, atol=1e-12)
    torch.testing.assert_close(our_aux, aux[own], rtol=0, atol=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=0, atol=1e-12)
    # The graph goes on through the reduction; each rank's square of the norm is the same one.
    expected = gradkit.value_and_grads(gradkit.tree.dot(grads, grads), params)[1]
    second = gradkit.value_and_grads(gradkit.tree.dot(our_grads, our_grads) / size, params)[1]
    for name, grad in gradkit.distributed.all_reduce(second, op="sum").items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-12)

    bad = (x[own], y[:0]) if rank == 0 else (x[own], y[own])
    error = gradkit.StructureError if rank == 0 else gradkit.CollectiveError
    with pytest.raises(error, match="" if rank == 0 else "an error on rank 0"):
        run(meta_loss, params, bad, has_aux=True, group=world)


def check_frozen_differently(device: torch.device) -> None:
    params = nn.ParameterDict({name: nn.Parameter(torch.ones(2, device=device)) for name in "ab"})
    params["ab"[dist.get_rank()]].requires_grad_(False)
    with pytest.raises(gradkit.StructureError, match="freeze the same parameters"):
        gradkit.meta.mean_value_and_grads(
            lambda p, task: (task * (p["a"] + 2 * p["b"])).sum(),
            params,
            torch.ones(3, 2, device=device),
            group=dist.group.WORLD,
        )


def test_other_parameters_frozen_on_another_rank(two: Ranks, device: torch.device) -> None:
    two.run(check_frozen_differently)


def test_the_mean_is_over_the_tasks_of_all_ranks(several: Ranks, device: torch.device) -> None:
    several.run(check_tasks)


def check_replicas(device: torch.device) -> None:
    """A penalty, and an inner step, on gradients that DDP's ranks have averaged."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device, torch.float64)
    call, params, _ = gradkit.func.make_functional(copy.deepcopy(module))  # of one process
    replica = DistributedDataParallel(module)
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(size, 5, 3, generator=generator, dtype=torch.float64).to(device)

    def joined(params: Any, shift: float = 0.0) -> Tensor:
        losses = [call(params, {}, part + shift)[0].square().mean() for part in batch]
        return torch.stack(losses).mean()

    def assert_same(ours: Any, expected: Any) -> None:
        for name, grad in expected.items():
            torch.testing.assert_close(ours["module." + name], grad, rtol=0, atol=1e-12)

    loss, grads = gradkit.value_and_grads(joined(params), params, create_graph=True)
    total = gradkit.value_and_grads(loss + gradkit.tree.dot(grads, grads), params)[1]
    ours, our_grads = gradkit.distributed.value_and_grads(
        replica(batch[rank]).square().mean(), replica, create_graph=True
    )
    penalized = ours + gradkit.tree.dot(our_grads, our_grads)
    assert_same(gradkit.distributed.value_and_grads(penalized, replica)[1], total)

    loss, grads = gradkit.value_and_grads(joined(params), params, create_graph=True)
    adapted = gradkit.tree.sub(params, gradkit.tree.scale(grads, 0.1))
    expected = gradkit.value_and_grads(joined(adapted, 1.0), params)[1]
    _, our_grads = gradkit.distributed.value_and_grads(
        replica(batch[rank]).square().mean(), replica, create_graph=True
    )
    adapted = {n: p - 0.1 * our_grads["module." + n] for n, p in module.named_parameters()}
    outer = call(adapted, {}, batch[rank] + 1.0)[0].square().mean()
    assert_same(gradkit.distributed.value_and_grads(outer, replica)[1], expected)


def test_second_order_over_replicas(several: Ranks, device: torch.device) -> None:
    several.run(check_replicas)
