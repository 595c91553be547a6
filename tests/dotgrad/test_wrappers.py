"""`step_` and optimizers that a library has wrapped; tests/tools has the libraries' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.helpers import same_bits, unchanged


class Accelerated(torch.optim.SGD):
    """As Accelerate's: it steps unless it is between two micro-batches, and unscales."""

    def __init__(self, params: Any, scaler: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self.optimizer = torch.optim.SGD(params, lr=0.1)
        self.gradient_state = SimpleNamespace(sync_gradients=True)
        self.scaler = scaler

    def step(self, closure: Any = None) -> None:
        if self.gradient_state.sync_gradients:
            step = self.optimizer.step if self.scaler is None else self.scaled_step
            step()

    def scaled_step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Lightning(torch.optim.SGD):
    """As Lightning's: it steps by its precision plugin, which has the scaler."""

    def __init__(self, params: Any, scaler: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self._strategy = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler))


def weight(device: torch.device) -> Tensor:
    return torch.ones(3, device=device, requires_grad=True)


def new_scaler(device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, init_scale=8.0)


def test_a_step_between_micro_batches_would_drop_the_gradients(device: torch.device) -> None:
    w = weight(device)
    optimizer = Accelerated([w])
    optimizer.gradient_state.sync_gradients = False
    with (
        unchanged(w),
        pytest.raises(gradkit.UnsupportedOptimizerError, match=r"dropped[^$]*tree\.add_"),
    ):
        gradkit.step_(optimizer, [w], [torch.ones_like(w)])
    optimizer.gradient_state.sync_gradients = True
    gradkit.step_(optimizer, [w], [torch.ones_like(w)])
    assert same_bits(w, weight(device) - 0.1)


@pytest.mark.parametrize("kind", [Accelerated, Lightning])
@pytest.mark.parametrize("option", ["scaler", "max_norm"])
def test_gradients_are_not_unscaled_twice(device: torch.device, kind: Any, option: str) -> None:
    w, scaler = weight(device), new_scaler(device)
    options = {"scaler": scaler} if option == "scaler" else {"max_norm": 1.0}
    error = pytest.raises(gradkit.UnsupportedOptimizerError, match="clip_by_global_norm")
    with unchanged(w), error:
        gradkit.step_(kind([w], scaler), [w], [torch.ones_like(w)], **options)


def test_a_wrapper_that_unscales_takes_the_gradients_of_the_scaled_loss(
    device: torch.device,
) -> None:
    w, scaler = weight(device), new_scaler(device)
    _, grads = gradkit.value_and_grads(scaler.scale(w.sum()), [w])
    gradkit.step_(Accelerated([w], scaler), [w], grads)
    assert same_bits(w, weight(device) - 0.1)
    assert w.grad is None


@pytest.mark.parametrize("kind", [Accelerated, Lightning])
def test_a_wrapper_without_a_scaler_clips(device: torch.device, kind: Any) -> None:
    w = weight(device)
    norm = gradkit.step_(kind([w]), [w], [torch.ones_like(w)], max_norm=10.0)
    assert norm is not None
    assert same_bits(w, weight(device) - 0.1)


def test_an_optimizer_of_deepspeed_does_not_step(device: torch.device) -> None:
    kind = type("Wrapper", (torch.optim.SGD,), {"__module__": "accelerate.utils.deepspeed"})
    w = weight(device)
    with unchanged(w), pytest.raises(gradkit.UnsupportedOptimizerError, match="DeepSpeed steps"):
        gradkit.step_(kind([w]), [w], [torch.ones_like(w)])
