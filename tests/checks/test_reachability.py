"""A loss that reaches no parameter at all is refused; one whose derivative is zero is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit

Linear = Callable[[Tensor], Tensor]
LINEAR: dict[str, Linear] = {
    "multiple": lambda x: (2 * x).sum(),
    "mean": lambda x: x.mean(),
    "matmul": lambda x: (x @ torch.ones(3, 2, device=x.device)).sum(),
    "stack": lambda x: torch.stack([x, -3 * x]).flip(0).sum(),
}


def eagerly(fn: Linear, x: Tensor) -> Tensor:
    return gradkit.value_and_grads(fn(x), x, create_graph=True)[1]


def by_func(fn: Linear, x: Tensor) -> Tensor:
    return gradkit.func.value_and_grads(fn)(x)[1]


def of_each(fn: Linear, x: Tensor) -> Tensor:
    return gradkit.per_loss_grads([fn(x), fn(x)], x, create_graph=True)[1]


GRADIENTS = [eagerly, by_func, of_each]
CALLS: dict[str, Callable[[Tensor, Any], Any]] = {
    "value_and_grads": gradkit.value_and_grads,
    "zeros": lambda loss, x: gradkit.value_and_grads(loss, x, unused="zeros"),
    "create_graph": lambda loss, x: gradkit.value_and_grads(loss, x, create_graph=True),
    "per_loss_grads": lambda loss, x: gradkit.per_loss_grads([loss, 2 * loss], x),
    "simultaneous_grads": lambda loss, x: gradkit.simultaneous_grads([loss], [x]),
    "vjp": lambda loss, x: gradkit.vjp(loss, x, torch.ones_like(loss)),
    "backward_": gradkit.backward_,
    "gram": lambda loss, x: gradkit.gram([loss, 2 * loss], x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_constant_gradient_reaches_what_it_was_computed_from_alone(
    device: torch.device, name: str, gradient: Callable[[Linear, Tensor], Tensor], call: str
) -> None:
    x, other, further = torch.randn(3, 2, 3, device=device).requires_grad_().unbind()
    x, other, further = (t.detach().requires_grad_() for t in (x, other, further))

    def slope() -> Tensor:
        return gradient(LINEAR[name], x).sum()

    assert slope().requires_grad
    for loss in (slope(), slope() + further.square().sum()):
        with pytest.raises(gradkit.UnreachedParamError, match=r"a path from (losses|outputs)"):
            CALLS[call](loss, other)
    # Its derivative where it was computed is zero, which torch.func says, too.
    CALLS[call](slope(), x)
    _, of_x = gradkit.value_and_grads(slope(), x, unused="zeros")
    twice = torch.func.grad(lambda x: torch.func.grad(LINEAR[name])(x).sum())
    assert torch.equal(of_x, twice(x.detach()))
    _, both = gradkit.value_and_grads(slope(), {"x": x, "other": other})
    assert both == {"x": None, "other": None}


class NoneInTheMiddle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> None:
        return None


def test_a_function_that_returns_none_is_no_zero_derivative(device: torch.device) -> None:
    """Beside a constant gradient as by itself."""
    x, other = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    cut = NoneInTheMiddle.apply(other).sum()
    for loss in (cut, cut + eagerly(LINEAR["mean"], x).sum()):
        with pytest.raises(gradkit.UnreachedParamError, match="a custom Function"):
            gradkit.value_and_grads(loss, other)
