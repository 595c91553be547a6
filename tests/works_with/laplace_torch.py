"""A last-layer Laplace approximation, fitted after training with gradkit: the same posterior."""

import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradkit
from tests.works_with._oracles import tried

PIP = "laplace-torch"


def tries():
    x, y = torch.randn(20, 3), torch.randn(20, 1)

    def fitted(step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(5):
            step(optimizer, model, (model(x) - y).square().mean())
        approximation = Laplace(
            model, "regression", subset_of_weights="all", hessian_structure="full"
        )
        approximation.fit(DataLoader(TensorDataset(x, y), batch_size=20))
        return approximation.posterior_precision

    def plain(optimizer, model, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    right = fitted(plain)
    yield tried(
        "fit after `minimize_`",
        right,
        lambda: fitted(plain),
        lambda: fitted(lambda o, m, loss: gradkit.minimize_(o, loss)),
        0.0,
    )
