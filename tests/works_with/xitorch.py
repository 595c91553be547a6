"""Root finding, eigenvalues, linear solves, interpolation and quadrature, by a parameter."""

import torch
import xitorch
from xitorch.integrate import quad
from xitorch.interpolate import Interp1D
from xitorch.linalg import solve, symeig
from xitorch.optimize import equilibrium, rootfinder

from tests.works_with._oracles import of_function

PIP = "xitorch"


def tries():
    torch.manual_seed(0)
    a = torch.tensor([0.7, 1.1], dtype=torch.float64)
    m = torch.randn(3, 3, dtype=torch.float64)
    exact = {"bck_options": {"method": "exactsolve"}}
    yield from of_function(
        lambda a: (
            rootfinder(
                lambda y, a: y**3 + a * y - 1,
                torch.ones(2, dtype=torch.float64),
                params=(a,),
                f_tol=1e-12,
                **exact,
            )
            .exp()
            .sum()
        ),
        a,
        "rootfinder: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda a: (
            equilibrium(
                lambda y, a: (a * y).cos(),
                torch.ones(2, dtype=torch.float64),
                params=(a,),
                f_tol=1e-12,
                **exact,
            )
            .exp()
            .sum()
        ),
        a,
        "equilibrium: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda m: (
            symeig(xitorch.LinearOperator.m(m + m.T, is_hermitian=True), neig=2, method="exacteig")[
                0
            ]
            .exp()
            .sum()
        ),
        m,
        "symeig: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda m: (
            solve(
                xitorch.LinearOperator.m(m @ m.T + torch.eye(3).double()),
                torch.ones(3, 1).double(),
                method="exactsolve",
            )
            .exp()
            .sum()
        ),
        m,
        "solve: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda a: quad(lambda x, a: (a * x).sin(), 0.0, 1.0, params=(a,), n=20).exp().sum(),
        a,
        "quad: ",
        second=False,
        tol=1e-4,
    )
    knots = torch.linspace(0, 1, 5, dtype=torch.float64)
    yield from of_function(
        lambda y: (
            Interp1D(knots, y, method="cspline")(torch.tensor([0.33, 0.7]).double()).exp().sum()
        ),
        torch.randn(5, dtype=torch.float64),
        "Interp1D by the values: ",
        tol=1e-4,
    )
