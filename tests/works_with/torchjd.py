"""Its aggregators on gradients per loss: the steps of `torchjd.autojac`."""

import torch
import torchjd.autojac
from torch import nn
from torchjd.aggregation import MGDA, AlignedMTL, Mean, UPGrad

import gradkit
from tests.works_with._oracles import tried

PIP = "torchjd[quadprog-projector]"


def tries():
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for cls in (UPGrad, MGDA, AlignedMTL, Mean):

        def losses(model):
            out = model(x)
            return [(out - y).square().mean(), out.square().mean()]

        def make():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

        def theirs(cls=cls):
            model = make()
            torchjd.autojac.backward(losses(model))
            torchjd.autojac.jac_to_grad(model.parameters(), cls())
            return [p.grad for p in model.parameters()]

        def ours(cls=cls):
            model = make()
            return list(
                gradkit.combine(gradkit.per_loss_grads(losses(model), model), cls()).values()
            )

        yield tried(f"`combine` with {cls.__name__}", theirs(), theirs, ours)
