"""LIF nodes, whose potential is kept from step to step, with a surrogate gradient."""

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import nn

from tests.works_with._oracles import of_module

PIP = "spikingjelly"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 6),
            neuron.ParametricLIFNode(surrogate_function=surrogate.ATan()),
            nn.Linear(6, 2),
            neuron.LIFNode(surrogate_function=surrogate.ATan()),
        )

    def forward(self, x):
        functional.reset_net(self)
        return sum(self.net(x * 3) for _ in range(5))


def tries():
    x = torch.randn(5, 4, dtype=torch.float64)
    yield from of_module(
        lambda: Net().double(),
        (x,),
        lambda m, x: (m(x) - 1).square().mean(),
        "",
        "steps functional samples",
    )
