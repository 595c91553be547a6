"""Two layers of leaky spiking cells over five steps, with a surrogate gradient."""

import snntorch
import torch
from snntorch import surrogate, utils
from torch import nn

from tests.works_with._oracles import of_module

PIP = "snntorch"


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
        options = {"beta": 0.9, "spike_grad": surrogate.atan()} | (
            {"init_hidden": True} if hidden else {"learn_beta": True}
        )
        self.cell, self.last, self.hidden = (
            snntorch.Leaky(**options),
            snntorch.Leaky(**options),
            hidden,
        )

    def forward(self, x):
        if self.hidden:
            utils.reset(self)
            for _ in range(5):
                spikes = self.last(self.b(self.cell(self.a(x))))
            return self.last.mem
        m, n = self.cell.init_leaky(), self.last.init_leaky()
        for _ in range(5):
            spikes, m = self.cell(self.a(x), m)
            _, n = self.last(self.b(spikes), n)
        return n


def tries():
    x = torch.randn(5, 4, dtype=torch.float64)
    for hidden in (True, False):
        # A surrogate is no derivative: the plain loop is the oracle.
        yield from of_module(
            lambda hidden=hidden: Net(hidden),
            (x.float(),),
            lambda m, x: m(x).square().mean(),
            "states kept in the cells: " if hidden else "",
            "steps functional",
        )
