"""`contract` over three tensors, one of them a parameter."""

import torch
from opt_einsum import contract

from tests.works_with._oracles import of_function

PIP = "opt_einsum"


def tries():
    a = torch.randn(3, 4, dtype=torch.float64)
    yield from of_function(
        lambda x: contract("ij,jk,kl->il", a, x.sin(), x.T @ x).square().sum(),
        torch.randn(4, 3, dtype=torch.float64) @ torch.randn(3, 4, dtype=torch.float64) / 4
        if False
        else torch.randn(4, 4, dtype=torch.float64),
    )
