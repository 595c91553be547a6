"""Where the messages are sent from by which ranks agree."""

from __future__ import annotations

import pytest
import torch

from gradkit.distributed._agreement import _device_of_messages


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cpu:gloo", "cuda:nccl,cpu:gloo"])
def test_from_the_cpu_where_a_backend_is_for_it(device: torch.device, config: str) -> None:
    assert _device_of_messages(config) == torch.device("cpu")


def test_from_the_device_that_is_chosen_where_none_is(device: torch.device) -> None:
    """Of any kind: its backend may be one that torch does not have."""
    assert _device_of_messages(f"{device.type}:other").type == device.type
    if device.type != "cpu":
        assert _device_of_messages(f"{device.type}:other").index == 0
