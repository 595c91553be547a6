"""Calls like earlier ones: one agreement, sums without a copy, and no less caution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradkit
from gradkit.distributed import _reduction
from tests.distributed.test_all_reduce import counted
from tests.distributed.test_ddp import Heads, assert_same, backward_of, batch, losses_of, wrapped
from tests.processes import Ranks

SIZES = {"together": 2**20, "singly": 96}


@contextmanager
def new_plans(how: str) -> Iterator[None]:
    """Forget all plans, and let all gradients be sent together, or the larger ones singly."""
    before = _reduction.LARGE
    _reduction.LARGE = SIZES[how]
    _reduction.plans.clear()
    try:
        yield
    finally:
        _reduction.LARGE = before
        _reduction.plans.clear()


def grads_of(model: nn.Module, step: int = 0, **options: Any) -> Any:
    losses = losses_of(model(batch(torch.device(device_of(model)), step)))
    return gradkit.distributed.value_and_grads(losses, model, **options)[1]


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def works_on(device: torch.device) -> None:
    total = gradkit.distributed.all_reduce(torch.ones(3, device=device), op="sum")
    assert total.tolist() == [dist.get_world_size()] * 3


def check_collectives(device: torch.device) -> None:
    with new_plans("together"):
        model = wrapped(device)
        assert [counted(lambda: grads_of(model)) for _ in range(3)] == [(1, 3), (1, 2), (1, 2)]

        def per_loss() -> None:
            gradkit.distributed.per_loss_grads(losses_of(model(batch(device))), model)

        assert [counted(per_loss) for _ in range(2)] == [(1, 3), (1, 2)]
        assert counted(lambda: grads_of(model, create_graph=True)) == (1, 3)


def test_a_call_like_an_earlier_one_agrees_once(two: Ranks, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("where gradients are on another device than messages, ranks agree twice")
    two.run(check_collectives)


def transposed(device: torch.device, **options: Any) -> DistributedDataParallel:
    """Return a module with a weight whose strides are those of its transpose."""
    torch.manual_seed(1)
    heads: Any = Heads()
    weight = heads.heads["b"].weight
    weight.data = weight.data.t().contiguous().t()
    return DistributedDataParallel(heads.to(device), **options)


def check_equal_to_backward(device: torch.device, how: str) -> None:
    """Bit for bit, also where the ranks reach different parameters, and strides are unusual."""
    rank = dist.get_rank()
    for options in ({}, {"find_unused_parameters": True}):
        with new_plans(how):
            model, other = (transposed(device, **options) for _ in range(2))
            names = ("a", "b") if rank == 0 or not options else ("a",)
            for step in range(4):
                x = batch(device, step)
                _, ours = gradkit.distributed.value_and_grads(losses_of(model(x, names)), model)
                assert_same(ours, backward_of(other, losses_of(other(x, names))))
                storages = {grad.untyped_storage().data_ptr() for grad in ours.values()}
                assert len(storages) == len(ours)
                for name, param in model.named_parameters():
                    assert ours[name].stride() == param.stride()
                    assert param.grad is None
            (plan,) = _reduction.plans.values()
            assert len(_reduction.buckets(plan.common, alone=True)) > (how == "singly")


@pytest.mark.parametrize("how", SIZES)
def test_planned_gradients_are_what_backward_leaves(
    several: Ranks, device: torch.device, how: str
) -> None:
    several.run(check_equal_to_backward, how)


class UserError(Exception):
    """What a hook raises on one rank."""


def check_failure_in_a_pass(device: torch.device, how: str) -> None:
    def fail(grad: Tensor) -> Tensor:
        raise UserError

    with new_plans(how):
        model = wrapped(device)
        expected = grads_of(model)
        grads_of(model)
        losses = losses_of(model(batch(device)))
        if dist.get_rank() == 1:
            model.module.trunk[0].bias.register_hook(fail)
            with pytest.raises(UserError):
                gradkit.distributed.value_and_grads(losses, model)
            model.module.trunk[0].bias._backward_hooks.clear()
        else:
            with pytest.raises(gradkit.CollectiveError, match="an error on rank 1"):
                gradkit.distributed.value_and_grads(losses, model)
        works_on(device)
        assert_same(grads_of(model), expected)
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("how", SIZES)
def test_a_rank_that_fails_in_a_planned_pass(
    several: Ranks, device: torch.device, how: str
) -> None:
    several.run(check_failure_in_a_pass, how)


def check_other_gradients(device: torch.device, how: str) -> None:
    """Ranks that reach other parameters than before agree anew: None everywhere stays None."""
    with new_plans(how):
        options = {"find_unused_parameters": True}
        model, other = wrapped(device, **options), wrapped(device, **options)
        rank = dist.get_rank()
        both = ("a", "b")
        for names in (both, both, ("a",), both if rank else ("a",), both, ("b",)):
            x = batch(device)
            _, ours = gradkit.distributed.value_and_grads(losses_of(model(x, names)), model)
            assert_same(ours, backward_of(other, losses_of(other(x, names))))
        assert [*_reduction.plans.values()] == [None]  # whose gradients vary is not planned for


@pytest.mark.parametrize("how", SIZES)
def test_gradients_that_are_not_as_planned(several: Ranks, device: torch.device, how: str) -> None:
    several.run(check_other_gradients, how)


def check_pass_inside_of_a_hook(device: torch.device) -> None:
    """It goes through the same parameters, whose gradients there are not those of the call."""
    with new_plans("singly"):
        model = wrapped(device)
        expected = grads_of(model)

        def inner(grad: Tensor) -> None:
            with torch.enable_grad():
                out = model.module(batch(device, 7))
                torch.autograd.grad(out["a"].sum() + out["b"].sum(), list(model.parameters()))

        out = model(batch(device))
        out["a"].register_hook(inner)
        losses = losses_of(out)
        _, ours = gradkit.distributed.value_and_grads(losses, model)
        assert_same(ours, expected)


def test_a_pass_inside_of_a_hook_is_another(two: Ranks, device: torch.device) -> None:
    two.run(check_pass_inside_of_a_hook)


def check_plans_of_some_ranks(device: torch.device, how: str) -> None:
    with new_plans(how):
        model = wrapped(device)
        expected = grads_of(model)
        grads_of(model)
        if dist.get_rank() == 1:
            _reduction.plans.clear()
        for _ in range(3):
            assert_same(grads_of(model), expected)
        with pytest.raises(gradkit.StructureError, match="create_graph on rank 1"):
            grads_of(model, create_graph=dist.get_rank() == 1)
        works_on(device)


@pytest.mark.parametrize("how", SIZES)
def test_plans_that_some_ranks_do_not_have(several: Ranks, device: torch.device, how: str) -> None:
    several.run(check_plans_of_some_ranks, how)


def check_modules_of_one_structure(device: torch.device) -> None:
    """A module of other shapes, or that ignores a parameter, is none of those planned for."""

    def linear(size: int, *ignored: str) -> DistributedDataParallel:
        torch.manual_seed(0)
        module = nn.Linear(size, 2).to(device)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return DistributedDataParallel(module)

    def grads(model: nn.Module, size: int) -> Any:
        x = torch.full((2, size), 1.0 + dist.get_rank(), device=device)
        return gradkit.distributed.value_and_grads(model(x).square().sum(), model)[1]

    with new_plans("together"):
        small, large, ignoring = linear(3), linear(5), linear(3, ".bias")
        for _ in range(3):
            for model, size in ((small, 3), (large, 5)):
                mean = grads(model, size)
                assert_same(gradkit.distributed.all_reduce(mean), mean)
            local = grads(ignoring, 3)
            both = gradkit.distributed.all_reduce(local)
            assert torch.equal(both["module.weight"], local["module.weight"])
            assert not torch.equal(both["module.bias"], local["module.bias"])


def check_parameters_without_elements(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.w = nn.Parameter(torch.ones(200, dtype=torch.float64))
            self.nothing = nn.Parameter(torch.ones(0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.scale.sum() * self.w.sum() + self.nothing.sum())

    model = DistributedDataParallel(Model().to(device))
    for _ in range(3):
        x = torch.tensor(1.0 + dist.get_rank(), device=device)
        _, grads = gradkit.distributed.value_and_grads(model(x), model)
        assert grads["module.w"].tolist() == [7.5] * 200  # the mean of x, times the sum of scale
        assert grads["module.nothing"].shape == (0,)


def test_parameters_without_elements(two: Ranks, device: torch.device) -> None:
    two.run(check_parameters_without_elements)


def test_modules_of_one_structure(two: Ranks, device: torch.device) -> None:
    two.run(check_modules_of_one_structure)
