"""A steerable convolution of the rotations by 90 degrees."""

import escnn
import torch
from torch import nn

from tests.works_with._oracles import of_module

PIP = "escnn"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        space = escnn.gspaces.rot2dOnR2(4)
        self.inside = escnn.nn.FieldType(space, [space.trivial_repr])
        middle = escnn.nn.FieldType(space, 2 * [space.regular_repr])
        self.net = escnn.nn.SequentialModule(
            escnn.nn.R2Conv(self.inside, middle, 3),
            escnn.nn.ReLU(middle),
            escnn.nn.GroupPooling(middle),
        )

    def forward(self, x):
        return self.net(self.inside(x)).tensor


def tries():
    yield from of_module(
        lambda: Net(),
        (torch.randn(2, 1, 6, 6),),
        lambda m, x: m(x).square().mean(),
        "",
        "steps samples functional",
        tol=1e-4,
    )
