"""The memory of gradients."""

from __future__ import annotations

import pytest
import torch

from gradkit._core import ownership


@pytest.mark.parametrize("shape", [(), (1,), (0, 2), (2, 3)])
def test_memory_for_a_gradient(device: torch.device, shape: tuple[int, ...]) -> None:
    p = torch.randn(shape, device=device)
    for leading in ((), (4,), (2, 0), (3, 2)):
        made = ownership.empty_for(p, torch.float64, leading)
        assert made.shape == leading + shape
        assert made.dtype == torch.float64
        if made.numel():
            assert made.is_contiguous() or not p.is_contiguous()
    transposed = torch.randn(3, 2, device=device).t()
    assert ownership.empty_for(transposed, torch.float32, (5,)).stride() == (
        6,
        *transposed.stride(),
    )
