"""Integrals by Simpson's and Boole's rules, Gauss-Legendre and Monte Carlo, by a parameter of the integrand."""

import torch
import torchquad

from tests.works_with._oracles import of_function

PIP = "torchquad"


def tries():
    a = torch.tensor([0.7], dtype=torch.float64)
    torchquad.set_up_backend("torch", data_type="float64")
    for cls in (torchquad.Simpson, torchquad.Boole, torchquad.GaussLegendre):
        yield from of_function(
            lambda a, c=cls: c().integrate(
                lambda x: (a * x[:, 0]).sin().exp(),
                dim=1,
                N=21,
                integration_domain=[[0, 1]],
                backend="torch",
            ),
            a,
            f"{cls.__name__}: ",
        )
    yield from of_function(
        lambda a: torchquad.MonteCarlo().integrate(
            lambda x: (a * x[:, 0]).sin().exp(),
            dim=1,
            N=50,
            integration_domain=[[0, 1]],
            seed=1,
            backend="torch",
        ),
        a,
        "MonteCarlo: ",
    )
    yield from of_function(
        lambda a: torchquad.Simpson().integrate(
            lambda x: x[:, 0].sin().exp(),
            dim=1,
            N=21,
            integration_domain=torch.cat([a * 0, a])[None],
            backend="torch",
        ),
        a,
        "by the bound: ",
    )
    torch.set_default_dtype(torch.float32)
