"""A neural SDE by Euler's method with a Brownian interval of a given seed; and its adjoint."""

import torch
import torchsde
from torch import nn

from tests.works_with._oracles import of_module

PIP = "torchsde"
NOTE = "with `make_functional`, use `sdeint`, for the same reason as torchdiffeq"


class Process(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift = nn.Linear(2, 2).double()
        self.spread = nn.Linear(2, 2).double()

    def f(self, t, y):
        return self.drift(y).tanh()

    def g(self, t, y):
        return self.spread(y).sigmoid()


def by(solve, **options):
    def loss(module, x, y):
        times = torch.tensor([0.0, 0.5], dtype=torch.float64)
        noise = torchsde.BrownianInterval(0.0, 0.5, size=x.shape, dtype=x.dtype, entropy=3)
        return (solve(module, x, times, bm=noise, dt=0.1, **options)[-1] - y).square().mean()

    return loss


def tries():
    batch = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    yield from of_module(
        Process,
        batch,
        by(torchsde.sdeint, method="euler"),
        "sdeint: ",
        "steps gradient hvp functional unroll",
    )
    yield from of_module(
        Process,
        batch,
        by(torchsde.sdeint_adjoint, method="euler"),
        "adjoint: ",
        "steps functional hvp",
        tol=0.2,
    )
