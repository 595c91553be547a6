"""Flows: MAF, NSF, NAF and SOSPF, and `zuko.utils.bisection`."""

import torch
import zuko

from tests.works_with._oracles import of_function, of_module

PIP = "zuko"


def loss(flow, x):
    return -flow().log_prob(x).mean()


def tries():
    x = torch.randn(3, 2, dtype=torch.float64) * 0.5
    for name in ("MAF", "NSF", "NAF", "SOSPF"):
        cls = getattr(zuko.flows, name, None)
        if cls is None:
            continue

        def make(cls=cls):
            return cls(features=2, context=0, transforms=2, hidden_features=(6,)).double()

        yield from of_module(
            make, (x,), loss, f"{name}: ", "steps gradient samples hvp functional", tol=1e-4
        )
    bisect = zuko.utils.bisection
    a = torch.tensor([0.7, 1.3], dtype=torch.float64)
    yield from of_function(
        lambda a: (
            bisect(lambda t: t**3 + t * a, torch.ones_like(a), 0 * a, 0 * a + 3, n=60, phi=(a,))
            .exp()
            .sum()
        ),
        a,
        "bisection: ",
    )
