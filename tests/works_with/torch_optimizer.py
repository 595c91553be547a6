"""Each optimizer that it exports, as far as the plain loop can step it: four steps."""

import inspect

import torch
import torch_optimizer

from tests.works_with._oracles import of_each_optimizer

PIP = "torch_optimizer"


def tries():
    classes = {
        name: cls
        for name, cls in vars(torch_optimizer).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    }
    yield from of_each_optimizer({
        name: lambda params, cls=cls: cls(params, lr=1e-2) for name, cls in classes.items()
    })
