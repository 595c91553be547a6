"""A masked autoregressive flow and a neural spline coupling."""

import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.nn.nets import ResidualNet
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from nflows.transforms.base import CompositeTransform
from nflows.transforms.coupling import PiecewiseRationalQuadraticCouplingTransform
from nflows.transforms.lu import LULinear

from tests.works_with._oracles import of_module

PIP = "nflows"


def make():
    return Flow(
        CompositeTransform([MaskedAffineAutoregressiveTransform(2, 6), LULinear(2)]),
        StandardNormal([2]),
    ).double()


def spline():
    coupling = PiecewiseRationalQuadraticCouplingTransform(
        [1, 0],
        lambda i, o: ResidualNet(i, o, 6, num_blocks=1),
        num_bins=4,
        tails="linear",
        tail_bound=3.0,
    )
    return Flow(coupling, StandardNormal([2])).double()


def loss(flow, x):
    return -flow.log_prob(x).mean()


def tries():
    x = torch.randn(3, 2, dtype=torch.float64)
    yield from of_module(make, (x,), loss, "MAF: ")
    yield from of_module(spline, (x,), loss, "spline: ")
