"""What only CUDA has: a test here skips where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _on_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("it is about CUDA")
