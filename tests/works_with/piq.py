"""SSIM, VIF, FSIM, GMSD and total variation by the image."""

import piq
import torch

from tests.works_with._oracles import of_function

PIP = "piq"


def tries():
    x, y = (
        torch.rand(1, 3, 42, 42, dtype=torch.float64),
        torch.rand(1, 3, 42, 42, dtype=torch.float64),
    )
    for name, fn in {
        "ssim": piq.ssim,
        "vif_p": piq.vif_p,
        "gmsd": piq.gmsd,
        "vsi": piq.vsi,
        "mdsi": piq.mdsi,
        "haarpsi": piq.haarpsi,
    }.items():
        yield from of_function(
            lambda x, f=fn: f(x, y, data_range=1.0).sum(), x, f"{name}: ", tol=1e-4
        )
    yield from of_function(lambda x: piq.total_variation(x), x, "total_variation: ")
