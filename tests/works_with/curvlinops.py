"""Its Hessian and GGN times a vector, compared with gradkit's hvp and ggn_vp."""

import curvlinops
import torch
from torch import nn

import gradkit
from tests.works_with._oracles import tried

PIP = "curvlinops-for-pytorch"


def tries():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    loss, params = nn.MSELoss(), list(model.parameters())
    named = dict(model.named_parameters())
    v = {name: torch.randn_like(p) for name, p in named.items()}
    flat = torch.cat([t.flatten() for t in v.values()])
    call, _, buffers = gradkit.func.make_functional(model)

    def slopes(by):
        moved = {n: p.detach() + by * v[n] for n, p in named.items()}
        return torch.cat([
            g.flatten()
            for g in gradkit.func.value_and_grads(
                lambda p: loss(call(p, buffers, x)[0], y), create_graph=False
            )(moved)[1].values()
        ])

    theirs = curvlinops.HessianLinearOperator(
        model, loss, dict(model.named_parameters()) if False else params, [(x, y)]
    )
    yield tried(
        "Hessian, `hvp`",
        (slopes(1e-5) - slopes(-1e-5)) / 2e-5,
        lambda: theirs @ flat,
        lambda: torch.cat([
            t.flatten()
            for t in gradkit.func.hvp(lambda p: loss(call(p, buffers, x)[0], y), dict(named), v)[
                1
            ].values()
        ]),
        1e-4,
    )
    ggn = curvlinops.GGNLinearOperator(model, loss, params, [(x, y)])
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x).flatten())({
        n: p.detach() for n, p in named.items()
    })
    j = torch.cat([t.flatten(1) for t in jac.values()], 1)
    yield tried(
        "GGN, `ggn_vp`",
        j.T @ (j @ flat) * 2 / 8,
        lambda: ggn @ flat,
        lambda: torch.cat([
            t.flatten()
            for t in gradkit.func.ggn_vp(
                lambda p: call(p, buffers, x)[0], lambda out: loss(out, y), dict(named), v
            )[1].values()
        ]),
    )
