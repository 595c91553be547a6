"""Whether code of the user's could run in a pass."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._core import user_code
from tests.helpers import Sevenfold


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
