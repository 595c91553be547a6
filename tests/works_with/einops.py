"""Rearrange and Reduce as layers, `rearrange` and `einsum` in the loss."""

import torch
from einops import einsum, rearrange
from einops.layers.torch import Rearrange, Reduce
from torch import nn

from tests.works_with._oracles import of_module

PIP = "einops==0.8.2"


def make():
    return nn.Sequential(
        Rearrange("b (h p) -> b h p", p=2),
        nn.Linear(2, 5),
        nn.Tanh(),
        Reduce("b h d -> b d", "mean"),
    ).double()


def loss(module, x, y):
    return (einsum(rearrange(module(x), "b d -> d b"), y, "d b, b d -> b") ** 2).mean()


def tries():
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    yield from of_module(make, (x, y), loss)
