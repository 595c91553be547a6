"""Losses of embeddings: triplet, NT-Xent, ArcFace (with weights of its own), proxy anchor."""

import torch
from pytorch_metric_learning import losses
from torch import nn

from tests.works_with._oracles import of_module

PIP = "pytorch-metric-learning"


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.net, self.loss = nn.Linear(4, 3), loss

    def forward(self, x, y):
        return self.loss(self.net(x), y)


def tries():
    batch = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2])
    for name, make in {
        "TripletMargin: ": lambda: losses.TripletMarginLoss(),
        "NTXent: ": lambda: losses.NTXentLoss(),
        "ArcFace: ": lambda: losses.ArcFaceLoss(3, 3),
        "ProxyAnchor: ": lambda: losses.ProxyAnchorLoss(3, 3),
    }.items():
        yield from of_module(
            lambda make=make: Net(make()).double(),
            batch,
            lambda m, x, y: m(x, y),
            name,
            "steps gradient hvp functional",
            tol=1e-4,
        )
