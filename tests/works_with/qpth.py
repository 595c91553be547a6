"""`QPFunction`: the solution of a quadratic program, by its linear term."""

import torch
from qpth.qp import QPFunction

from tests.works_with._oracles import of_function

PIP = "qpth"


def tries():
    torch.manual_seed(0)
    q = torch.eye(3, dtype=torch.float64) * 2
    g, h = torch.randn(4, 3, dtype=torch.float64), torch.ones(4, dtype=torch.float64) * 0.3
    e = torch.tensor([], dtype=torch.float64)
    p = torch.randn(1, 3, dtype=torch.float64)
    yield from of_function(
        lambda p: QPFunction(verbose=-1, eps=1e-12)(q, p, g, h, e, e).exp().sum(), p, tol=1e-3
    )
