"""MAML's `clone` and `adapt` in an eager call."""

import learn2learn
import torch
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "learn2learn==0.2.0"


def tries():
    x, y = torch.randn(6, 3), torch.randn(6, 1)

    def after(model):
        clone = learn2learn.algorithms.MAML(model, lr=0.1).clone()
        clone.adapt((clone(x) - y).square().mean())
        return (clone(x) - y).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    right = torch.autograd.grad(after(model), list(model.parameters()))
    yield tried(
        "`value_and_grads` of MAML",
        right,
        lambda: right,
        lambda: list(gradkit.value_and_grads(after(model), model)[1].values()),
    )
