"""A learned filterbank: encoder and decoder."""

import torch
from asteroid_filterbanks import Decoder, Encoder, FreeFB, ParamSincFB
from torch import nn

from tests.works_with._oracles import of_module

PIP = "asteroid-filterbanks"


class Net(nn.Module):
    def __init__(self, bank):
        super().__init__()
        self.encode, self.decode = (
            Encoder(bank(n_filters=6, kernel_size=9)),
            Decoder(FreeFB(n_filters=6, kernel_size=9)),
        )

    def forward(self, x):
        return self.decode(self.encode(x).tanh())


def tries():
    x = torch.randn(2, 1, 40, dtype=torch.float64)
    for bank in (FreeFB, ParamSincFB):
        yield from of_module(
            lambda bank=bank: Net(bank).double(),
            (x,),
            lambda m, x: m(x).square().mean(),
            f"{bank.__name__}: ",
            tol=1e-4,
        )
