"""Trees whose leaves are on several devices: the CPU and a GPU, or two GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradkit
from tests.helpers import assert_same_bits


@pytest.fixture(params=["cpu", "cuda:1"])
def other(device: torch.device, request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the second leaf."""
    if request.param == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    return torch.device(request.param)


def params_on(*devices: torch.device) -> dict[str, Tensor]:
    return {
        f"layer{i}": torch.linspace(-1, 1, 9, device=device).view(3, 3).requires_grad_()
        for i, device in enumerate(devices)
    }


def losses_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    first, second = params.values()
    hidden = torch.tanh(first @ first)
    out = hidden.to(second.device) @ second
    return {"fit": out.square().mean(), "size": hidden.square().sum()}


def test_gradients_are_where_their_params_are(device: torch.device, other: torch.device) -> None:
    params = params_on(device, other)
    _, grads = gradkit.value_and_grads(losses_of(params), params)
    torch.autograd.backward(list(losses_of(params).values()))
    assert_same_bits(grads.values(), [param.grad for param in params.values()])
    assert [grad.device for grad in grads.values()] == [p.device for p in params.values()]


def test_steps_of_params_on_two_devices(device: torch.device, other: torch.device) -> None:
    ours, theirs = params_on(device, other), params_on(device, other)
    optimizer = torch.optim.Adam(ours.values(), lr=0.1)
    _, grads = gradkit.value_and_grads(losses_of(ours), ours)
    gradkit.step_(optimizer, ours, grads)
    torch.autograd.backward(list(losses_of(theirs).values()))
    torch.optim.Adam(theirs.values(), lr=0.1).step()
    assert_same_bits(ours.values(), theirs.values())


def test_leaves_are_added_where_they_are(device: torch.device, other: torch.device) -> None:
    params = params_on(device, other)
    _, grads = gradkit.value_and_grads(losses_of(params), params)
    doubled = gradkit.tree.add(grads, gradkit.tree.scale(grads, 1.0))
    assert_same_bits(doubled.values(), [grad * 2 for grad in grads.values()])
    norm = gradkit.tree.global_norm(grads)
    squares = gradkit.tree.dot(grads, grads)
    torch.testing.assert_close(norm.square().cpu(), squares.cpu())
