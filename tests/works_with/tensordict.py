"""A TensorDictModule in the loss; parameters as a TensorDict, swapped in."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from tests.works_with._oracles import of_module

PIP = "tensordict"


def make():
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["h"]),
        TensorDictModule(nn.Sequential(nn.Tanh(), nn.Linear(4, 1)), in_keys=["h"], out_keys=["y"]),
    ).double()  # fmt: skip


def loss(module, x, y):
    return (module(TensorDict({"x": x}, batch_size=x.shape[:1]))["y"] - y).square().mean()


def tries():
    yield from of_module(
        make, (torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)), loss
    )
