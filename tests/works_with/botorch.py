"""Acquisition functions of a Gaussian process, log EI and UCB: gradients, and Hessian times vector, by eager calls."""

import torch
from botorch.acquisition import LogExpectedImprovement, UpperConfidenceBound
from botorch.models import SingleTaskGP

import gradkit
from tests.works_with._oracles import tried

PIP = "botorch"
NOTE = "`gradkit.func`: refused, as the model writes on what it has cached; use the eager calls"


def tries():
    data = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(6, 2)
    model = SingleTaskGP(data, (3 * data).sin().sum(1, keepdim=True)).eval().requires_grad_(False)
    start = torch.tensor([[0.3, 0.6], [0.7, 0.1]], dtype=torch.float64)
    along, step = torch.ones_like(start), 1e-5
    for name, acquisition in {
        "log EI": LogExpectedImprovement(model, best_f=0.5),
        "UCB": UpperConfidenceBound(model, beta=2.0),
    }.items():

        def value(x, acquisition=acquisition):
            return acquisition(x[:, None]).sum()

        def slope(x, value=value):
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(value(leaf), leaf)[0]

        def moved(by, value=value):
            return value(start + by * along).detach()

        def product_by_torch(value=value):
            leaf = start.clone().requires_grad_()
            (grad,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
            return torch.autograd.grad(grad, leaf, along)[0]

        def ours(order, value=value):
            leaf = start.clone().requires_grad_()
            _, grad = gradkit.value_and_grads(value(leaf), leaf, create_graph=order == 2)
            if order == 1:
                return (grad * along).sum()
            return gradkit.value_and_grads((grad * along).sum(), leaf)[1]

        yield tried(
            f"{name}: gradient",
            lambda moved=moved: (moved(step) - moved(-step)) / (2 * step),
            lambda slope=slope: (slope(start) * along).sum(),
            lambda ours=ours: ours(1),
        )
        yield tried(
            f"{name}: hvp",
            lambda slope=slope: (
                (slope(start + step * along) - slope(start - step * along)) / (2 * step)
            ),
            product_by_torch,
            lambda ours=ours: ours(2),
            1e-4,
        )
