"""A real NVP, and a residual flow with an estimated log-determinant."""

import normflows as nf
import torch

from tests.works_with._oracles import in_float64, of_module

PIP = "normflows"


def real_nvp():
    with in_float64():
        flows = []
        for _ in range(2):
            flows += [
                nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 2], init_zeros=False)),
                nf.flows.Permute(2, mode="swap"),
                nf.flows.ActNorm(2),
            ]
        return nf.NormalizingFlow(nf.distributions.base.DiagGaussian(2), flows).double()


def residual():
    with in_float64():
        net = nf.nets.LipschitzMLP([2, 8, 2], init_zeros=False, lipschitz_const=0.9)
        return nf.NormalizingFlow(
            nf.distributions.base.DiagGaussian(2), [nf.flows.Residual(net, reduce_memory=False)]
        ).double()


def tries():
    x = torch.randn(4, 2, dtype=torch.float64)
    yield from of_module(real_nvp, (x,), lambda m, x: m.forward_kld(x), "real NVP: ")
    yield from of_module(
        residual,
        (x,),
        lambda m, x: m.forward_kld(x),
        "residual: ",
        "steps gradient hvp functional",
        tol=1e-3,
    )
