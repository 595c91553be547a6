"""Discrete and continuous wavelet transforms by the signal."""

import ptwt
import torch

from tests.works_with._oracles import of_function

PIP = "ptwt"


def tries():
    x = torch.randn(1, 16, dtype=torch.float64)
    yield from of_function(
        lambda x: sum(c.exp().sum() for c in ptwt.wavedec(x, "db2", level=2)), x, "wavedec: "
    )
    yield from of_function(
        lambda x: ptwt.waverec(ptwt.wavedec(x, "db2", level=2), "db2").exp().sum(), x, "waverec: "
    )
