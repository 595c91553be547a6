"""Ranks that raise or are killed: the others raise in time, and no process is left."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gradkit
from tests.distributed.test_ddp import batch, losses_of, wrapped
from tests.processes import PATIENCE, Ranks, forking, ranks

pytestmark = pytest.mark.processes

TIMEOUT = 10.0 * PATIENCE  # seconds, of the groups below: who waits so long counts as hanging
SOON = timedelta(seconds=4)


def slow(value: object) -> Any:
    """Return one of several cases, each of which waits for seconds; `make test` runs another."""
    return pytest.param(value, marks=pytest.mark.slow)


class UserError(Exception):
    """What a training raises on one rank."""


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def wait_less() -> None:
    """Shorten the timeout, where the ranks have met: a busy machine needed long until then."""
    dist.distributed_c10d._set_pg_timeout(SOON)


def raise_before(device: torch.device, call: str) -> None:
    """The last rank raises before the call; it is alive, and its connections are open."""
    model = wrapped(device)
    losses = losses_of(model(batch(device)))
    dist.barrier()
    if is_last():
        raise UserError
    wait_less()
    name = "gradkit.add_grads_" if call == "add_grads_" else f"gradkit.distributed.{call}"
    with pytest.raises(gradkit.CollectiveError, match=f"{name} on rank 0") as raised:
        make(call, losses, model)
    assert "timeout" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert all(param.grad is None for param in model.parameters())


def make(call: str, losses: Any, model: Any) -> None:
    if call == "all_reduce":
        gradkit.distributed.all_reduce({name: loss.detach() for name, loss in losses.items()})
    elif call == "add_grads_":
        grads = {name: torch.ones_like(param) for name, param in model.named_parameters()}
        gradkit.add_grads_(model, grads, hooks=True)
    else:
        getattr(gradkit.distributed, call)(losses, model)


@pytest.mark.parametrize("call", ["all_reduce", *map(slow, ["per_loss_grads", "add_grads_"])])
def test_a_rank_that_does_not_make_the_call(device: torch.device, call: str) -> None:
    with ranks(2, device, TIMEOUT, forking()) as two:
        outcomes = two.outcomes(raise_before, call)
        assert outcomes[1][0] == "raised"
        assert "UserError" in outcomes[1][1]
        assert outcomes[0] == ("returned", None)
    assert_gone(two)


def raise_inside(device: torch.device) -> None:
    """The last rank raises between the agreement and the sum."""
    if is_last():

        def failing(*_: Any, **__: Any) -> None:
            raise UserError

        dist.all_reduce = failing
        with pytest.raises(UserError):
            gradkit.distributed.all_reduce(torch.ones(2, device=device))
    else:
        all_reduce = dist.all_reduce

        def waiting_less(*args: Any, **options: Any) -> Any:
            wait_less()
            return all_reduce(*args, **options)

        dist.all_reduce = waiting_less
        with pytest.raises(gradkit.CollectiveError, match=r"gradkit\.distributed\.all_reduce"):
            gradkit.distributed.all_reduce(torch.ones(2, device=device))


def test_a_rank_that_raises_inside_of_the_collective(device: torch.device) -> None:
    with ranks(2, device, TIMEOUT, forking()) as two:
        assert [kind for kind, _ in two.outcomes(raise_inside)] == ["returned"] * 2
    assert_gone(two)


def die(device: torch.device, inside: bool) -> str:
    """The last rank is killed, before the call or inside of it."""
    dist.barrier()
    if is_last():
        if inside:
            dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            gradkit.distributed.all_reduce(torch.ones(2, device=device))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_less()
    with pytest.raises(gradkit.CollectiveError) as raised:
        gradkit.distributed.all_reduce(torch.ones(2, device=device))
    return str(raised.value)


@pytest.mark.parametrize("inside", [slow(False), True])
def test_a_rank_that_is_killed(device: torch.device, inside: bool) -> None:
    with ranks(4, device, TIMEOUT, forking()) as four:
        outcomes = four.outcomes(die, inside)
        assert [kind for kind, _ in outcomes] == ["returned"] * 3 + ["died"]
        for _, text in outcomes[:3]:
            assert "gradkit.distributed.all_reduce on rank" in text
    assert_gone(four)


class Failing(nn.Module):
    """Fails on the last rank between its layers; a shard of the second has the bytes of a message.

    gloo would take the next message of that rank for the shard that the others wait for.
    """

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if is_last() and self.fault == "raises":
            raise UserError("in the middle")
        if is_last() and self.fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        out: Tensor = self.last(x)
        return out


def fail_over_shards(device: torch.device, fault: str) -> None:
    """What the other ranks wait for is named."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dist.barrier()
    wait_less()
    module = Failing(fault).to(device, torch.float64)
    call, params, _ = gradkit.distributed.make_functional(module, mesh)
    x = torch.ones(1, 8, device=device, dtype=torch.float64)
    if fault == "raises between the passes":
        loss = call(params, {}, x)[0].sum()
        if is_last():
            raise UserError
        with pytest.raises(
            gradkit.CollectiveError, match=r"of params\['last\.weight'\], in the call"
        ):
            gradkit.value_and_grads(loss, params)
        return
    if is_last():
        with pytest.raises(UserError):
            call(params, {}, x)
    else:
        with pytest.raises(gradkit.CollectiveError) as raised:
            call(params, {}, x)
        assert "the gather of params['last.weight'], in the call of" in str(raised.value)
    # Who goes on as if nothing had happened gets no result, and gives none to others.
    with pytest.raises(gradkit.CollectiveError):
        call(params, {}, x)


OVER_SHARDS = {
    "raises": ["returned", "returned"],
    "is killed": ["returned", "died"],
    "raises between the passes": ["returned", "raised"],
}


@pytest.mark.parametrize(
    "fault", ["is killed", *map(slow, ["raises", "raises between the passes"])]
)
def test_a_rank_that_fails_over_shards(device: torch.device, fault: str) -> None:
    with ranks(2, device, TIMEOUT, forking()) as two:
        outcomes = two.outcomes(fail_over_shards, fault)
        assert [kind for kind, _ in outcomes] == OVER_SHARDS[fault], outcomes
    assert_gone(two)


def assert_gone(group: Ranks) -> None:
    assert not any(process.is_alive() for process in group.processes)


def check_bad_leaf_on_one_rank(device: torch.device) -> str:
    """If one rank refuses its input, all raise at once, long before the timeout."""
    with pytest.raises((gradkit.CollectiveError, gradkit.LeafTypeError)) as raised:
        gradkit.distributed.all_reduce(
            "no tensor" if dist.get_rank() else torch.ones(2, device=device)
        )
    return type(raised.value).__name__


def test_bad_input_on_one_rank_is_not_waited_for(device: torch.device) -> None:
    with ranks(2, device, TIMEOUT, forking()) as two:
        assert two.run(check_bad_leaf_on_one_rank) == ["CollectiveError", "LeafTypeError"]
