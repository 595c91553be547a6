"""An exponential moving average of the parameters beside `minimize_`."""

import torch
from torch import nn
from torch_ema import ExponentialMovingAverage

import gradkit
from tests.works_with._oracles import tried

PIP = "torch-ema"


def tries():
    x, y = torch.randn(6, 3), torch.randn(6, 1)

    def averaged(ours):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer, ema = (
            torch.optim.Adam(model.parameters(), lr=1e-2),
            ExponentialMovingAverage(model.parameters(), decay=0.9),
        )
        for _ in range(4):
            loss = (model(x) - y).square().mean()
            if ours:
                gradkit.minimize_(optimizer, loss)
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ema.update()
        with ema.average_parameters():
            return [p.detach().clone() for p in model.parameters()]

    yield tried(
        "an average after `minimize_`",
        averaged(False),
        lambda: averaged(False),
        lambda: averaged(True),
        0.0,
    )
