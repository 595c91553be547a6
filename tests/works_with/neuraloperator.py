"""A Fourier neural operator in two dimensions."""

import torch
from neuralop.models import FNO

from tests.works_with._oracles import of_module

PIP = "neuraloperator"


def tries():
    make = lambda: FNO(
        n_modes=(2, 2),
        hidden_channels=4,
        in_channels=1,
        out_channels=1,
        n_layers=2,
        projection_channel_ratio=1,
        lifting_channel_ratio=1,
    )
    yield from of_module(
        make,
        (torch.randn(2, 1, 6, 6),),
        lambda m, x: m(x).square().mean(),
        "",
        "steps samples functional",
        tol=1e-4,
    )
