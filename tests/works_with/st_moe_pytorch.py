"""A mixture of experts with its balance loss and router z-loss."""

import torch
from st_moe_pytorch import MoE

from tests.works_with._oracles import of_module

PIP = "st-moe-pytorch"


def loss(module, x):
    out = module(x)
    return (out.outputs - x).square().mean() + out.total_aux_loss


def tries():
    make = lambda: MoE(
        dim=4, num_experts=3, gating_top_n=2, threshold_train=0.2, capacity_factor_train=2.0
    ).double()
    yield from of_module(
        make, (torch.randn(2, 6, 4, dtype=torch.float64),), loss, "", "steps functional"
    )
