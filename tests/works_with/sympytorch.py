"""A SymPy expression as a module, with trainable floats."""

import sympy
import sympytorch
import torch

from tests.works_with._oracles import of_module

PIP = "sympytorch sympy"


def make():
    x = sympy.symbols("x_name")
    return sympytorch.SymPyModule(
        expressions=[sympy.cos(1.5 * x) * sympy.exp(0.3 * x), 2.5 * sympy.sin(x)]
    ).double()


def tries():
    yield from of_module(
        make, (torch.randn(4, dtype=torch.float64),), lambda m, x: m(x_name=x).square().mean()
    )
