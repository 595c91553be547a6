"""Its checkpoint_wrapper, around a layer."""

import torch
from fairscale.nn import checkpoint_wrapper
from torch import nn

from tests.works_with._oracles import mse, of_module

PIP = "fairscale"


def tries():
    batch = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    make = lambda: nn.Sequential(
        nn.Linear(3, 3),
        checkpoint_wrapper(nn.Sequential(nn.Linear(3, 5), nn.Tanh())),
        nn.Linear(5, 2),
    ).double()
    yield from of_module(make, batch, mse)
