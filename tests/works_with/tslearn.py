"""`SoftDTWLossPyTorch`: soft dynamic time warping of two series."""

import torch
from tslearn.metrics import SoftDTWLossPyTorch

from tests.works_with._oracles import of_function

PIP = "tslearn"


def tries():
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 1, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
    loss = SoftDTWLossPyTorch(gamma=0.5)
    yield from of_function(lambda x: loss(x, y).sum().sin(), x, "SoftDTW: ")
    normalized = SoftDTWLossPyTorch(gamma=0.5, normalize=True)
    yield from of_function(
        lambda x: normalized(x, x.flip(1) * 0 + y[:, :4]).sum().sin(), x, "normalized: "
    )
