"""An all-pole filter that varies in time, by the signal and by the coefficients."""

import torch
from torchlpc import sample_wise_lpc

from tests.works_with._oracles import of_function

PIP = "torchlpc"


def tries():
    x, a = torch.randn(1, 8, dtype=torch.float64), 0.2 * torch.randn(1, 8, 2, dtype=torch.float64)
    yield from of_function(lambda x: sample_wise_lpc(x, a).exp().sum(), x, "by the signal: ")
    yield from of_function(lambda a: sample_wise_lpc(x, a).exp().sum(), a, "by the coefficients: ")
