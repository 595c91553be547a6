"""`SamplesLoss`: Sinkhorn divergence, Gaussian and energy MMD, by the points."""

import torch
from geomloss import SamplesLoss

from tests.works_with._oracles import of_function

PIP = "geomloss"
NOTE = "the Sinkhorn divergence is differentiated as if it had converged: more iterations (`scaling=0.99`); second derivatives: write the kernel out"


def tries():
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    for options in (
        {"loss": "sinkhorn", "blur": 0.5},
        {"loss": "sinkhorn", "blur": 0.5, "debias": False},
        {"loss": "gaussian", "blur": 0.7},
        {"loss": "energy"},
        {"loss": "laplacian", "blur": 0.7},
    ):
        name = options["loss"] + (", biased" if "debias" in options else "")
        loss = SamplesLoss(
            **options, backend="tensorized", **({"scaling": 0.95} if "sinkhorn" in name else {})
        )
        yield from of_function(lambda x, f=loss: f(x, y).exp(), x, f"{name}: ", tol=2e-3)
