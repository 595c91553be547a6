"""An engine whose update function is `minimize_`."""

import torch
from ignite.engine import Engine
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "pytorch-ignite"


def tries():
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]

    def trained(ours):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def update(engine, batch):
            loss = (model(batch[0]) - batch[1]).square().mean()
            if ours:
                return gradkit.minimize_(optimizer, loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        Engine(update).run(data, max_epochs=2)
        return [p.detach() for p in model.parameters()]

    yield tried(
        "`minimize_` as the update",
        trained(False),
        lambda: trained(False),
        lambda: trained(True),
        0.0,
    )
