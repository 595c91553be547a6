"""Its differentiable optimizers in an eager call; and steps of its `Optimizer`s, which take a loss."""

import torch
import torchopt
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "torchopt"


def tries():
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)

    def make(by=0.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            model[0].weight.add_(by)
        return model

    def after(model):
        call = torch.func.functional_call
        params = dict(model.named_parameters())
        chain = torchopt.adam(lr=0.05, eps=1e-3)
        state = chain.init(params)
        for _ in range(2):
            loss = (call(model, params, x) - y).square().mean()
            grads = dict(
                zip(
                    params,
                    torch.autograd.grad(loss, params.values(), create_graph=True),
                    strict=True,
                )
            )
            updates, state = chain.update(grads, state, inplace=False)
            params = torchopt.apply_updates(params, updates, inplace=False)
        return (call(model, params, x) - y).square().mean()

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
        1e-4,
    )
