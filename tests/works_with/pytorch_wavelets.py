"""A discrete wavelet transform and its inverse, and a dual-tree one, by the image."""

import torch
from pytorch_wavelets import DTCWTForward, DWTForward, DWTInverse

from tests.works_with._oracles import of_function

PIP = "pytorch-wavelets"


def tries():
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    forward, inverse, tree = (
        DWTForward(J=2, wave="db2", mode="symmetric").double(),
        DWTInverse(wave="db2", mode="symmetric").double(),
        DTCWTForward(J=2).double(),
    )

    def through(x):
        low, high = forward(x)
        return inverse((low.tanh(), [h.sin() for h in high])).square().mean()

    yield from of_function(through, x, "DWT: ")
    yield from of_function(
        lambda x: sum(h.exp().sum() for h in (tree(x)[0], *tree(x)[1])), x, "DTCWT: "
    )
