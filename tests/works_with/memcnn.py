"""An invertible module wrapper, whose input is freed and computed again in the backward pass."""

import memcnn
import torch
from torch import nn

from tests.works_with._oracles import of_module

PIP = "memcnn"
NOTE = "a reentrant checkpoint: `gradkit.func.checkpoint`, or `use_reentrant=False`"


def make():
    coupling = memcnn.AdditiveCoupling(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    )
    return memcnn.InvertibleModuleWrapper(
        coupling, keep_input=True, keep_input_inverse=True
    ).double()


def tries():
    x = torch.randn(4, 6, dtype=torch.float64)
    yield from of_module(make, (x,), lambda m, x: m(x.clone().requires_grad_()).square().mean())
