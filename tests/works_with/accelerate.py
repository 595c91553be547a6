"""A prepared optimizer (AcceleratedOptimizer) in a loop."""

import torch
from accelerate import Accelerator

from tests.works_with._oracles import of_optimizer

PIP = "accelerate"


def tries():
    accelerator = Accelerator(cpu=True)
    yield from of_optimizer(lambda params: accelerator.prepare(torch.optim.Adam(params, lr=1e-2)))
