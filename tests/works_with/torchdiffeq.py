"""A neural ODE: `odeint` by dopri5 and rk4, `odeint_adjoint`, and the time of an event."""

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

from tests.works_with._oracles import of_function, of_module

PIP = "torchdiffeq"
NOTE = "with `make_functional`, use `odeint`: the adjoint calls the module in the backward pass, when its own parameters are back; `hvp` of a Function without `setup_context`: two eager calls with `create_graph=True`"


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, t, y):
        return self.net(y)


def by(solve, method):
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    options = {"method": method} | (
        {"options": {"step_size": 0.25}} if method == "rk4" else {"rtol": 1e-9, "atol": 1e-9}
    )

    def loss(module, x, y):
        return (solve(module, x, times, **options)[-1] - y).square().mean()

    return loss


def tries():
    batch = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    yield from of_module(Field, batch, by(odeint, "rk4"), "rk4: ")
    yield from of_module(
        Field, batch, by(odeint, "dopri5"), "dopri5: ", "steps gradient hvp functional"
    )
    yield from of_module(
        Field,
        batch,
        by(odeint_adjoint, "rk4"),
        "adjoint: ",
        "steps gradient hvp functional",
        tol=3e-3,
    )

    def end(t):
        return odeint(
            lambda t, y: torch.sin(t) * y**2,
            t[:1] * 0 + 0.5,
            torch.cat([t * 0, t]),
            rtol=1e-10,
            atol=1e-10,
        )[-1].sum()

    yield from of_function(end, torch.tensor([0.7], dtype=torch.float64), "by the end time: ")
    yield from of_function(
        lambda y: odeint_adjoint(
            lambda t, y: torch.sin(y),
            y,
            torch.tensor([0.0, 1.0], dtype=torch.float64),
            rtol=1e-10,
            atol=1e-10,
            adjoint_params=(),
        )[-1].sum(),
        torch.randn(3, dtype=torch.float64),
        "adjoint, by the start: ",
    )
