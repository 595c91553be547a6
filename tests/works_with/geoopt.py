"""RiemannianAdam and RiemannianSGD on a sphere; distances in hyperbolic balls."""

import geoopt
import torch

from tests.works_with._oracles import of_function, of_optimizer

PIP = "geoopt"


def tries():
    for cls in (geoopt.optim.RiemannianAdam, geoopt.optim.RiemannianSGD):
        yield from of_optimizer(lambda params, c=cls: c(params, lr=1e-2), f"{cls.__name__}: ")
    torch.manual_seed(0)
    x, y = torch.rand(2, 3, dtype=torch.float64) * 0.3, torch.rand(2, 3, dtype=torch.float64) * 0.3
    ball, sphere = geoopt.PoincareBall(), geoopt.Sphere()
    yield from of_function(lambda x: ball.dist(x, y).sum(), x, "PoincareBall.dist: ")
    yield from of_function(
        lambda x: ball.logmap(x, y).exp().sum(), x, "PoincareBall.logmap: ", tol=1e-4
    )
    yield from of_function(
        lambda x: sphere.dist(sphere.projx(x), sphere.projx(y)).sum(), x, "Sphere.dist: ", tol=1e-4
    )
    spd = geoopt.SymmetricPositiveDefinite()
    base = torch.eye(3, dtype=torch.float64) + 0.2
    yield from of_function(
        lambda m: spd.dist(m @ m.T + torch.eye(3).double(), base).sum(),
        torch.randn(3, 3, dtype=torch.float64),
        "SPD.dist: ",
        tol=1e-4,
    )
