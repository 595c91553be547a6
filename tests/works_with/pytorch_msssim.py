"""`ssim` by the image."""

import torch
from pytorch_msssim import ssim

from tests.works_with._oracles import of_function

PIP = "pytorch-msssim"


def tries():
    x, y = (
        torch.rand(1, 1, 12, 12, dtype=torch.float64),
        torch.rand(1, 1, 12, 12, dtype=torch.float64),
    )
    yield from of_function(lambda x: ssim(x, y, data_range=1.0), x)
