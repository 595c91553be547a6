"""LIF cells over five steps, with a surrogate gradient."""

import norse.torch as norse
import torch
from torch import nn

from tests.works_with._oracles import of_module

PIP = "norse"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.cell, self.b = (
            nn.Linear(4, 6),
            norse.LIFCell(norse.LIFParameters(alpha=torch.tensor(100.0), v_th=torch.tensor(0.1))),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        state, out = None, 0
        for _ in range(5):
            spikes, state = self.cell(self.a(x), state)
            out = out + self.b(spikes)
        return out


def tries():
    x = torch.randn(5, 4, dtype=torch.float64)
    yield from of_module(
        lambda: Net().double(),
        (x,),
        lambda m, x: m(x).square().mean(),
        "",
        "steps functional samples",
    )
