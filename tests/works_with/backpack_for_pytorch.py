"""An extended module goes on with gradkit; its hooks are seen."""

import torch
from backpack import extend
from torch import nn

from tests.works_with._oracles import mse, of_module

PIP = "backpack-for-pytorch"
NOTE = "`hvp` before `extend`"


def tries():
    batch = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    yield from of_module(
        lambda: extend(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()),
        batch,
        mse,
    )
