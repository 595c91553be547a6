"""Whether code of the user's could run in a pass."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._core import user_code
from gradkit._core.graph import nodes_below, nodes_of_types
from tests.helpers import Sevenfold
from tests.strategies import Program, build, programs


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def notice_living_functions(device: str) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    assert not any(user_code.functions_alive())
    for make in (
        lambda: Twice.apply(w),
        lambda: torch.vmap(Sevenfold.apply)(w),  # whose node is of a class that torch makes
        lambda: (Twice.apply(w * 2) * 3).sum(),
        lambda: checkpoint(lambda x: x * 2, w, use_reentrant=True),
    ):
        held = make()
        assert any(user_code.functions_alive())
        del held
        assert not any(user_code.functions_alive())

    class Fresh(Twice):
        pass

    held = Fresh.apply(w)
    assert any(user_code.functions_alive())
    del held


@pytest.mark.processes
def test_a_living_custom_function_is_noticed_and_a_dead_one_is_not(device: torch.device) -> None:
    """In a process of its own: another test may leave a Function alive, or hold its class."""
    name = notice_living_functions.__name__
    code = f"from tests.core.test_user_code import {name}; {name}({str(device)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_without_exact_reference_counts_every_graph_is_walked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_code._free_threaded.cache_clear()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert any(user_code.functions_alive())
    w = torch.randn(3, device=device, requires_grad=True)
    assert torch.equal(gradkit.value_and_grads((w * w).sum(), w)[1], 2 * w.detach())
    user_code._free_threaded.cache_clear()


@given(program=programs(leaf_hooks=False))
def test_the_walk_for_functions_finds_those_of_the_graph(
    device: torch.device, program: Program
) -> None:
    """All of them, though it ends once it has seen as many as there may be in the process."""
    made = build(program, device, torch.float64)
    losses = [loss for loss in made.losses if loss.requires_grad]
    assume(losses)
    most = user_code.most_nodes_of_users()
    for loss in losses:
        every = nodes_below([loss])
        expected = {node for node in every if type(node) in user_code.user_functions([type(node)])}
        assert expected == set(nodes_of_types([loss], most))
        for kind in set(map(type, expected)):
            assert most[kind] >= sum(type(node) is kind for node in expected)


def most_by_name() -> dict[str, int]:
    """Return the largest numbers of nodes, and hold no type: a reference counts as a node."""
    return {kind.__name__: most for kind, most in user_code.most_nodes_of_users().items()}


def test_the_walk_ends_where_no_more_can_come(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    before = most_by_name().get("TwiceBackward", 0)
    inner = Twice.apply(w * 1)
    top = Twice.apply(torch.tanh(inner))
    assert most_by_name()["TwiceBackward"] == before + 2
    kind = type(top.grad_fn)
    assert nodes_of_types([top], {kind: 1}) == [top.grad_fn]
    assert nodes_of_types([top], {kind: 2}) == [top.grad_fn, inner.grad_fn]
    assert nodes_of_types([w], {kind: 1}) == []
    del top, inner, kind
    gc.collect()
    assert most_by_name().get("TwiceBackward", 0) == before
