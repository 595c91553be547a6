"""A spherical harmonic transform, its inverse, and a discrete-continuous convolution, by the field."""

import torch
import torch_harmonics as th

from tests.works_with._oracles import of_function

PIP = "torch-harmonics"


def tries():
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    forward, inverse = th.RealSHT(8, 16).double(), th.InverseRealSHT(8, 16).double()
    yield from of_function(
        lambda x: inverse(forward(x) * (1 + forward(x).abs())).square().mean(), x, tol=1e-4
    )
