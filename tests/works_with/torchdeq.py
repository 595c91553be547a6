"""A deep equilibrium layer: the implicit gradient, the inexact one, and back-propagation through the solver."""

import torch
from torch import nn
from torchdeq import get_deq

from tests.works_with._oracles import of_module

PIP = "torchdeq"
NOTE = 'second derivatives: `core="sliced"`, unrolled; the default gradient is an estimate'


class Layer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mix, self.inject = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.mix.weight.mul_(0.5)
        self.deq = get_deq(f_max_iter=60, b_max_iter=60, f_tol=1e-11, b_tol=1e-11, **options)

    def forward(self, x):
        z, _ = self.deq(lambda z: (self.mix(z) + self.inject(x)).tanh(), torch.zeros_like(x))
        return z[-1]


def tries():
    x = torch.randn(4, 4, dtype=torch.float64)
    for name, options in {
        "implicit: ": {"ift": True},
        "phantom (the default): ": {},
        "unrolled: ": {"grad": 60, "core": "sliced"},
    }.items():
        yield from of_module(
            lambda options=options: Layer(**options).double(),
            (x,),
            lambda m, x: m(x).square().mean(),
            name,
            "steps gradient hvp functional",
            tol=1e-4,
        )
