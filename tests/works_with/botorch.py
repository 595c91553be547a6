"""Acquisition functions of a GP by the candidate: analytic, Monte Carlo, and smooth helpers."""

import torch
from botorch.acquisition import (
    ExpectedImprovement,
    LogExpectedImprovement,
    UpperConfidenceBound,
    qExpectedImprovement,
    qLogExpectedImprovement,
)
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils import safe_math
from botorch.utils.probability import utils as probability
from botorch.utils.probability.mvnxpb import MVNXPB

from tests.works_with._oracles import of_function

PIP = "botorch"


def tries():
    torch.manual_seed(0)
    train = torch.rand(5, 2, dtype=torch.float64)
    model = SingleTaskGP(train, (train.sum(1, keepdim=True) * 3).sin()).eval()
    model.requires_grad_(False)
    x = torch.rand(1, 2, dtype=torch.float64)
    best = torch.tensor(0.9, dtype=torch.float64)
    for name, acq in {
        "LogEI": LogExpectedImprovement(model, best),
        "EI": ExpectedImprovement(model, best),
        "UCB": UpperConfidenceBound(model, 0.2),
        "qEI": qExpectedImprovement(
            model, best, sampler=SobolQMCNormalSampler(torch.Size([8]), seed=1)
        ),
        "qLogEI": qLogExpectedImprovement(
            model, best, sampler=SobolQMCNormalSampler(torch.Size([8]), seed=1)
        ),
    }.items():
        yield from of_function(lambda x, f=acq: f(x).sum(), x, f"{name}: ", tol=1e-4)
    v = torch.tensor([-0.7, 0.4, 1.3], dtype=torch.float64)
    for name in ("log1mexp", "log1pexp", "fatplus", "log_fatplus", "log_softplus"):
        f = getattr(safe_math, name, None)
        if f is not None:
            yield from of_function(
                lambda v, f=f: f(-v.abs() - 0.1 if f is safe_math.log1mexp else v).exp().sum(),
                v,
                f"{name}: ",
            )
    yield from of_function(lambda v: safe_math.fatmax(v, 0).sin().sum(), v, "fatmax: ")
    yield from of_function(
        lambda v: safe_math.logdiffexp(v, v.exp() + 1).sum().sin(), v, "logdiffexp: "
    )
    for name in (
        "ndtr",
        "log_ndtr",
        "log_phi",
        "phi",
        "log_erfc",
        "log_erfcx",
        "log_prob_normal_in",
        "standard_normal_log_hazard",
    ):
        f = getattr(probability, name, None)
        if f is not None:
            yield from of_function(
                (lambda v, f=f: f(v, v + 1).sum().sin())
                if name == "log_prob_normal_in"
                else (lambda v, f=f: f(v).sum().sin()),
                v,
                f"{name}: ",
            )
            yield from of_function(
                (lambda v, f=f: f(v, v + 1).sum().sin())
                if name == "log_prob_normal_in"
                else (lambda v, f=f: f(v).sum().sin()),
                v * 5,
                f"{name} far out: ",
            )
    cov = torch.eye(3, dtype=torch.float64) + 0.3
    yield from of_function(
        lambda v: MVNXPB(cov, torch.stack([-torch.ones_like(v), v], -1)).solve().sum(),
        v + 1,
        "MVNXPB: ",
        tol=1e-4,
    )
