"""Its DPOptimizer steps as before beside gradkit; per-sample gradients of its GRU and attention."""

import torch
from opacus.layers import DPGRU, DPMultiheadAttention
from torch import nn

from tests.works_with._oracles import of_module

PIP = "opacus"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.attention, self.out = (
            DPGRU(3, 4, batch_first=True),
            DPMultiheadAttention(4, 2),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        h = self.rnn(x)[0].transpose(0, 1)
        return self.out(self.attention(h, h, h)[0].transpose(0, 1)).mean(1)


def tries():
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    yield from of_module(lambda: Net().double(), (x,), lambda m, x: m(x).square().mean())
