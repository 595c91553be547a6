"""AdaBelief, with rectification."""

from adabelief_pytorch import AdaBelief

from tests.works_with._oracles import of_optimizer

PIP = "adabelief-pytorch"


def tries():
    yield from of_optimizer(lambda params: AdaBelief(params, lr=1e-2, print_change_log=False))
