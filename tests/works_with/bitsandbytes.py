"""Its 32-bit Adam and Lion on the CPU, and a frozen 8-bit linear below an adapter."""

import bitsandbytes as bnb

from tests.works_with._oracles import of_optimizer

PIP = "bitsandbytes"


def tries():
    yield from of_optimizer(lambda params: bnb.optim.Adam(params, lr=1e-2, optim_bits=32), "Adam: ")
    yield from of_optimizer(lambda params: bnb.optim.Lion(params, lr=1e-2, optim_bits=32), "Lion: ")
