"""The ELBO of a small model and guide, and distributions that Pyro adds."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from tests.works_with._oracles import of_function, of_module

PIP = "pyro-ppl"


class Guided(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = (
            nn.Parameter(torch.zeros(3).double()),
            nn.Parameter(torch.zeros(3).double() - 1),
        )

    def model(self, x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3).double(), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    def guide(self, x, y):
        pyro.sample("w", dist.Normal(self.mean, self.log_std.exp()).to_event(1))


def elbo(module, x, y):
    pyro.clear_param_store()
    return Trace_ELBO().differentiable_loss(module.model, module.guide, x, y) / len(x)


def tries():
    batch = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    yield from of_module(Guided, batch, elbo, "Trace_ELBO: ")
    v = torch.tensor([0.7, 1.3], dtype=torch.float64)
    yield from of_function(
        lambda v: (
            dist.Stable(1.5, 0.1, v, v).log_prob(torch.tensor([0.3, 0.4]).double()).sum().sin()
            if hasattr(dist.Stable, "log_prob")
            else v.sum()
        ),
        v,
        "Stable: ",
        tol=1e-3,
    )
    yield from of_function(
        lambda v: dist.SkewLogistic(v, v, v).log_prob(torch.tensor([0.3, 2.4]).double()).sum(),
        v,
        "SkewLogistic: ",
    )
    yield from of_function(
        lambda v: (
            dist
            .MaskedMixture(torch.tensor([True, False]), dist.Normal(v, v), dist.Gamma(v, v))
            .log_prob(torch.tensor([0.3, 2.4]).double())
            .sum()
        ),
        v,
        "MaskedMixture: ",
    )
    yield from of_function(
        lambda v: (
            dist
            .AVFMultivariateNormal(v, torch.eye(2).double() * v, torch.ones(2, 1, 2).double())
            .log_prob(torch.tensor([0.3, 2.4]).double())
            .sum()
        ),
        v,
        "AVFMultivariateNormal: ",
    )

    def drawn(make):
        def fn(v):
            torch.manual_seed(3)
            return make(v).rsample().square().sum()

        return fn

    yield from of_function(
        drawn(
            lambda v: dist.OMTMultivariateNormal(
                v, torch.tril(v[:, None] * v) + torch.eye(2).double()
            )
        ),
        v,
        "OMTMultivariateNormal, a draw: ",
    )
    yield from of_function(
        drawn(
            lambda v: dist.MixtureOfDiagNormals(
                v.expand(2, 2) + torch.arange(2).double()[:, None], v.expand(2, 2), v
            )
        ),
        v,
        "MixtureOfDiagNormals, a draw: ",
    )
