"""A Mamba of one layer, with the parallel scan (its own Function) and the sequential one; parts are float32."""

import torch
from mambapy.mamba import Mamba, MambaConfig

from tests.works_with._oracles import of_module

PIP = "mambapy"


def tries():
    x = torch.randn(3, 4, 4, dtype=torch.float64)
    for pscan in (True, False):
        yield from of_module(
            lambda pscan=pscan: Mamba(
                MambaConfig(d_model=4, n_layers=1, d_state=3, pscan=pscan)
            ).double(),
            (x,),
            lambda m, x: m(x).square().mean(),
            "parallel scan: " if pscan else "sequential: ",
            tol=2e-3,
        )
