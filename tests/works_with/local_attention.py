"""Local attention with a window, and rotary positions."""

import torch
from local_attention import LocalMHA

from tests.works_with._oracles import of_module

PIP = "local-attention"


def tries():
    make = lambda: LocalMHA(dim=8, window_size=2, dim_head=4, heads=2, causal=True).double()
    yield from of_module(
        make, (torch.randn(2, 6, 8, dtype=torch.float64),), lambda m, x: m(x).square().mean()
    )
