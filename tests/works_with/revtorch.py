"""A reversible block, whose activations are computed again in the backward pass."""

import revtorch
import torch
from torch import nn

from tests.works_with._oracles import of_module

PIP = "revtorch"
NOTE = "steps and gradients by the eager calls; nothing that runs the module as a function"


def make():
    def half():
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    blocks = nn.ModuleList([
        revtorch.ReversibleBlock(half(), half(), split_along_dim=1) for _ in range(2)
    ])
    return revtorch.ReversibleSequence(blocks).double()


def tries():
    x = torch.randn(4, 6, dtype=torch.float64)
    yield from of_module(make, (x,), lambda m, x: m(x.clone().requires_grad_()).square().mean())
