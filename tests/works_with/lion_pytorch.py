"""Lion, also with decoupled weight decay."""

from lion_pytorch import Lion

from tests.works_with._oracles import of_optimizer

PIP = "lion-pytorch"


def tries():
    yield from of_optimizer(lambda params: Lion(params, lr=1e-2, weight_decay=0.1))
