"""A neural CDE driven by a cubic spline of the data."""

import torch
import torchcde
from torch import nn

from tests.works_with._oracles import of_module

PIP = "torchcde"


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.net = nn.Linear(2, 3), nn.Linear(3, 6)

    def forward(self, t, z):
        return self.net(z).tanh().view(*z.shape[:-1], 3, 2)


def loss(module, x):
    path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
    z = torchcde.cdeint(
        X=path,
        func=module,
        z0=module.start(path.evaluate(path.interval[0])),
        t=path.interval,
        adjoint=False,
        method="rk4",
    )
    return z[:, -1].square().mean()


def tries():
    yield from of_module(
        lambda: Field().double(),
        (torch.randn(3, 5, 2, dtype=torch.float64),),
        loss,
        "",
        "steps gradient hvp functional",
        tol=1e-4,
    )
