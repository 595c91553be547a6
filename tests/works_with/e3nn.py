"""A tensor product and a gate on spherical harmonics of positions; forces from an energy."""

import torch
from e3nn import o3
from torch import nn

from tests.works_with._oracles import of_function, of_module

PIP = "e3nn"
NOTE = "a loss that calls `requires_grad_()` runs eagerly, or takes its inner gradient by `gradkit.func`"


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.harmonics = o3.Irreps.spherical_harmonics(2)
        self.product = o3.FullyConnectedTensorProduct(self.harmonics, self.harmonics, "4x0e + 2x1o")
        self.out = o3.Linear("4x0e + 2x1o", "1x0e")

    def forward(self, x):
        h = o3.spherical_harmonics(self.harmonics, x, normalize=False)
        return self.out(self.product(h, h).tanh())


def make():
    return Energy().double()


def loss(module, x):
    x = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (force - x).square().mean()


def tries():
    x = torch.randn(4, 3, dtype=torch.float64)
    yield from of_module(make, (x,), lambda m, x: m(x).square().mean(), "energy: ")
    yield from of_module(make, (x,), loss, "forces: ", "steps gradient functional hvp")
    torch.manual_seed(0)
    yield from of_function(
        lambda x: o3.spherical_harmonics([0, 1, 2], x, normalize=True).tanh().sum(),
        x,
        "by the positions: ",
    )
