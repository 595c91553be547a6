"""The engine is called as torch.autograd.grad calls it, wherever the difference can be seen."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration

import gradkit
from tests.helpers import assert_same_bits


def test_torch_logs_the_nodes_of_a_pass_when_asked(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    gradkit.value_and_grads((x * x).sum(), [x])
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "torch.autograd.graph"):
        gradkit.value_and_grads((x * x).sum(), [x])
        gradkit.per_loss_grads([(x * x).sum()], [x])
    assert sum("MulBackward0" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize("threads", [True, False])
def test_threads_of_devices_get_the_context(device: torch.device, threads: bool) -> None:
    """As torch 2.13 gives it: the compiler's options, for where a compiled backward pass runs."""
    x = torch.ones(2, device=device, requires_grad=True)
    seen: list[bool] = []

    def see(grad: Tensor) -> None:
        seen.append(torch._C._is_key_in_tls("context"))

    def passes() -> list[Tensor]:
        middle = x * x
        middle.register_hook(see)
        value, grads = gradkit.value_and_grads(middle.sum(), [x])
        middle = x * x
        middle.register_hook(see)
        return [value, *grads, *gradkit.per_loss_grads(middle.sum(), [x])]

    middle = x * x
    middle.register_hook(see)
    torch.autograd.grad(middle.sum(), x)
    theirs = seen.pop()
    results = passes()  # nothing is remembered of it: a backend may be registered at any time
    seen.clear()
    with (
        patch.object(torch.accelerator, "is_available", lambda: threads),
        patch.object(backend_registration, "_privateuse1_backend_name", f"threads_{threads}"),
    ):
        assert_same_bits(results, passes())
    assert seen == [threads and theirs] * 2
    assert_same_bits(results, passes())
