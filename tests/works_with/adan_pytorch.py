"""Adan, which keeps the last gradient."""

from adan_pytorch import Adan

from tests.works_with._oracles import of_optimizer

PIP = "adan-pytorch"


def tries():
    yield from of_optimizer(lambda params: Adan(params, lr=1e-2))
