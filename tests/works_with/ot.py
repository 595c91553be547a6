"""POT: `emd2`, Sinkhorn, one-dimensional and Bures distances, by cost, points and weights."""

import ot
import torch

from tests.works_with._oracles import of_function

PIP = "POT"
NOTE = "the Bures distance: write the root with `torch.linalg.eigh`"


def tries():
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    a, b = torch.full((4,), 0.25, dtype=torch.float64), torch.full((5,), 0.2, dtype=torch.float64)

    def cost(x):
        return (x[:, None] - y).square().sum(-1)

    yield from of_function(lambda x: ot.emd2(a, b, cost(x)).exp(), x, "emd2: ")
    yield from of_function(
        lambda x: (
            (
                ot.sinkhorn(
                    a, b, cost(x), 1.0, method="sinkhorn_log", numItermax=100, stopThr=1e-12
                )
                * cost(x)
            )
            .sum()
            .exp()
        ),
        x,
        "sinkhorn log: ",
    )
    yield from of_function(
        lambda x: ot.solve_sample(x, y, reg=1.0, max_iter=100, tol=1e-12).value_linear.exp(),
        x,
        "solve_sample: ",
    )
    yield from of_function(
        lambda x: ot.solve_sample(
            x, y, reg=1.0, grad="envelope", max_iter=100, tol=1e-12
        ).value.exp(),
        x,
        "solve_sample, envelope: ",
    )
    yield from of_function(lambda x: ot.wasserstein_1d(x[:, 0], y[:, 0], p=2).exp(), x, "1d: ")
    yield from of_function(
        lambda x: (
            ot.gaussian
            .bures_wasserstein_distance(x.mean(0), y.mean(0), x.T @ x, y.T @ y)
            .exp()
            .sum()
        ),
        x,
        "Bures: ",
    )
