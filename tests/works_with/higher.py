"""Its patched module inside an eager call: the gradient through two of its steps, by the first weights."""

import higher
import torch
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "higher"


def tries():
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)

    def after(model, **options):
        with higher.innerloop_ctx(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            copy_initial_weights=False,
        ) as (inner, optimizer):
            for _ in range(2):
                optimizer.step((inner(x) - y).square().mean())
            return (inner(x) - y).square().mean()

    def make(by=0.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            model[0].weight.add_(by)
        return model

    def theirs():
        model = make()
        after(model).backward()
        return model[0].weight.grad.sum()

    def ours():
        model = make()
        return gradkit.value_and_grads(after(model), model)[1]["0.weight"].sum()

    yield tried(
        "`value_and_grads` through its loop",
        (after(make(1e-5)) - after(make(-1e-5))) / 2e-5,
        theirs,
        ours,
    )
