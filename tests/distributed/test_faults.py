"""Ranks that raise, or are killed: the others end with an error, in time, and no process stays."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradkit
from tests.processes import Ranks, ranks
from tests.distributed.test_ddp import batch, losses_of, wrapped

TIMEOUT = 4.0  # seconds, of the groups below
GRACE = 10.0  # that a busy machine may need besides


class UserError(Exception):
    """What a training raises on one rank."""


def raise_before(device: torch.device, call: str) -> float:
    """The last rank raises, and never comes; return how long the others have waited."""
    model = wrapped(device)
    losses = losses_of(model(batch(device)))
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(TIMEOUT + 1)  # it is alive, and its connections are open
        raise UserError
    start = time.monotonic()
    name = "gradkit.add_grads_" if call == "add_grads_" else f"gradkit.distributed.{call}"
    with pytest.raises(gradkit.CollectiveError, match=f"{name} on rank 0") as raised:
        make(call, losses, model)
    assert "timeout" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert all(param.grad is None for param in model.parameters())
    return time.monotonic() - start


def make(call: str, losses: Any, model: Any) -> None:
    if call == "all_reduce":
        gradkit.distributed.all_reduce({name: loss.detach() for name, loss in losses.items()})
    elif call == "add_grads_":
        grads = {name: torch.ones_like(param) for name, param in model.named_parameters()}
        gradkit.add_grads_(model, grads, hooks=True)
    else:
        getattr(gradkit.distributed, call)(losses, model)


@pytest.mark.parametrize("call", ["all_reduce", "per_loss_grads", "add_grads_"])
def test_a_rank_that_does_not_come(device: torch.device, call: str) -> None:
    with ranks(2, device, TIMEOUT) as two:
        outcomes = two.outcomes(raise_before, call)
        assert outcomes[1][0] == "raised"
        assert "UserError" in outcomes[1][1]
        kind, waited = outcomes[0]
        assert kind == "returned", waited
        assert waited < TIMEOUT + GRACE
    assert_gone(two)


def raise_inside(device: torch.device) -> None:
    """The last rank raises between the agreement and the sum."""
    if dist.get_rank() == dist.get_world_size() - 1:

        def failing(*_: Any, **__: Any) -> None:
            raise UserError

        dist.all_reduce = failing
        with pytest.raises(UserError):
            gradkit.distributed.all_reduce(torch.ones(2, device=device))
        time.sleep(TIMEOUT + 1)
    else:
        with pytest.raises(gradkit.CollectiveError, match=r"gradkit\.dist\.all_reduce"):
            gradkit.distributed.all_reduce(torch.ones(2, device=device))


def test_a_rank_that_raises_inside_of_the_collective(device: torch.device) -> None:
    with ranks(2, device, TIMEOUT) as two:
        assert [kind for kind, _ in two.outcomes(raise_inside)] == ["returned"] * 2
    assert_gone(two)


def die(device: torch.device, inside: bool) -> tuple[str, float]:
    """The last rank is killed, before the call or inside of it."""
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        if inside:
            dist.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            gradkit.distributed.all_reduce(torch.ones(2, device=device))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gradkit.CollectiveError) as raised:
        gradkit.distributed.all_reduce(torch.ones(2, device=device))
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("inside", [False, True])
def test_a_rank_that_is_killed(device: torch.device, inside: bool) -> None:
    with ranks(4, device, TIMEOUT) as four:
        outcomes = four.outcomes(die, inside)
        assert [kind for kind, _ in outcomes] == ["returned"] * 3 + ["died"]
        for _, (told, waited) in outcomes[:3]:
            assert "gradkit.distributed.all_reduce on rank" in told
            assert waited < 2 * TIMEOUT + GRACE  # one for the agreement, one for the sum
    assert_gone(four)


def assert_gone(group: Ranks) -> None:
    assert not any(process.is_alive() for process in group.processes)


def hold_the_hand(device: torch.device) -> tuple[str, float]:
    """A rank that refuses its input ends the call on all at once, long before the timeout."""
    start = time.monotonic()
    with pytest.raises((gradkit.CollectiveError, gradkit.LeafTypeError)) as raised:
        gradkit.distributed.all_reduce(
            "no tensor" if dist.get_rank() else torch.ones(2, device=device)
        )
    return type(raised.value).__name__, time.monotonic() - start


def test_bad_input_on_one_rank_is_not_waited_for(device: torch.device) -> None:
    with ranks(2, device, 60.0) as two:
        (first, waited), (second, _) = two.run(hold_the_hand)
        assert (first, second) == ("CollectiveError", "LeafTypeError")
        assert waited < 30.0
