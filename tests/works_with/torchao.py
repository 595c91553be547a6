"""Fake-quantized training (QAT), an 8-bit Adam, and a frozen int8 weight below a head."""

import torch
from torch import nn
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.works_with._oracles import mse, of_module, of_optimizer

PIP = "torchao"


def frozen():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))
    quantize_(model[0], Int8WeightOnlyConfig())
    model[0].requires_grad_(False)
    return model


def tries():
    yield from of_optimizer(lambda params: AdamW8bit(params, lr=1e-2), "AdamW8bit: ")
    batch = torch.randn(5, 4), torch.randn(5, 3)
    wrapped = lambda: nn.Sequential(nn.Linear(4, 4), frozen())
    yield from of_module(wrapped, batch, mse, "int8 weight: ", "steps functional", tol=1e-4)
