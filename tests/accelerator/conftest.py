"""What only the emulated accelerator tells: a test here skips where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator import emulation


@pytest.fixture(autouse=True)
def _is_emulated(device: torch.device) -> None:
    if not emulation.KIND:
        pytest.skip("it is about the emulated accelerator: GRADKIT_EMULATE=cuda")
