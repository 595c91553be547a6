"""Steps on CUDA with scalers, autocast and the optimizers' ways: the bits of the `.grad` loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.cuda.training import (
    backward_of,
    batch_on,
    loss_of,
    losses_of,
    model_on,
    step,
    step_by_dot_grad,
)
from tests.helpers import assert_same_bits

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_under_autocast(device: torch.device, dtype: torch.dtype) -> None:
    model, x = model_on(device), batch_on(device)

    def losses() -> dict[str, Tensor]:
        with torch.autocast(device.type, dtype):
            return losses_of(model, x)

    with torch.autocast(device.type, dtype):
        assert model(x).dtype == dtype
    _, grads = gradkit.value_and_grads(losses(), model)
    assert_same_bits(grads.values(), backward_of(model, *losses().values()).values())
    per_loss = gradkit.per_loss_grads(losses(), model, strategy="sequential")
    for name, one in per_loss.items():
        assert_same_bits(one.values(), backward_of(model, losses()[name]).values())


def train(device: torch.device, *, by_dot_grad: bool) -> tuple[list[Tensor], float]:
    """Return the weights after some steps in half precision, one of which overflows."""
    model, x = model_on(device), batch_on(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    for factor in (1.0, math.inf, 1.0, 2.0):
        with torch.autocast(device.type, torch.float16):
            loss = loss_of(model, x) * factor
        if by_dot_grad:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        else:
            _, grads = gradkit.value_and_grads(scaler.scale(loss), model)
            gradkit.step_(optimizer, model, grads, scaler=scaler)
        scaler.update()
    return [param.detach() for param in model.parameters()], scaler.get_scale()


def test_steps_with_a_scaler(device: torch.device) -> None:
    (ours, our_scale), (theirs, scale) = (train(device, by_dot_grad=way) for way in (False, True))
    assert our_scale == scale == 2.0**9
    assert all(param.isfinite().all() for param in ours)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_steps_of_foreach_and_fused_optimizers(device: torch.device, kind: Any, way: str) -> None:
    ours, theirs, x = model_on(device), model_on(device), batch_on(device)
    optimizer, other = (kind(m.parameters(), lr=0.1, **{way: True}) for m in (ours, theirs))
    for _ in range(3):
        step(optimizer, ours, x)
        step_by_dot_grad(other, theirs, x)
    assert_same_bits(ours.state_dict().values(), theirs.state_dict().values())
