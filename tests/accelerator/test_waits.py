"""A clean call reads no number: the host goes on while the device works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.accelerator import emulation
from tests.accelerator.test_streams import CALLS, forward, model_on

# Of these, a number says whether the fast way was right: whether a norm has digits, or is finite.
READ = {"weights=function", "gram", "gram, chunk_size=1", "per_loss_norms", "per_sample_norms"}
READ |= {"clipped_sum"}


@pytest.mark.parametrize("call", sorted(CALLS.keys() - READ))
def test_a_clean_call_waits_for_nothing(device: torch.device, call: str) -> None:
    model, x = model_on(device), torch.randn(5, 8, device=device)
    for _ in range(2):
        losses, hidden = forward(model, x)
        with emulation.waits() as seen:
            CALLS[call](losses, model, hidden)
    assert not seen


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_recomputed_steps_are_compared_once_in_a_pass(device: torch.device, memory: Any) -> None:
    w, rate = (torch.ones((), device=device, requires_grad=True) for _ in range(2))
    sgd = gradkit.meta.sgd(lr=0.1)

    def loss_fn(w: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        return (w * x * rate).square()

    with emulation.waits() as seen:
        batches = list(torch.ones(3, device=device))
        out = gradkit.meta.unroll(loss_fn, w, batches, sgd, outer=rate, memory=memory)
        assert not seen
        torch.autograd.grad(out.params, rate)
    assert len(seen) == (memory == "recompute")
