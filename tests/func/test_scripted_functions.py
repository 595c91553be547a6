"""Functions of torch.jit inside gradkit.func: right in every call, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func

D = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def wave(x: Tensor) -> Tensor:
    return torch.sin(x) * x.exp()


class Wave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * x.exp()


# Each is compiled anew: torch keeps what it has compiled.
MAKE: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "script": lambda x: (
        torch.jit.CompilationUnit("def wave(x):\n    return torch.sin(x) * torch.exp(x)\n").wave
    ),
    "trace": lambda x: torch.jit.trace(lambda x: torch.sin(x) * x.exp(), x),
    "module": lambda x: torch.jit.script(Wave()),
}
Loss = Callable[[Tensor], Tensor]


def slope(fn: Loss) -> Loss:
    return lambda x: func.value_and_grads(fn)(x)[1]


SECOND: dict[str, Callable[[Loss, Tensor, Tensor], Tensor]] = {
    "hvp": lambda fn, x, v: func.hvp(fn, x, v)[1],
    "hvp, reverse-over-reverse": lambda fn, x, v: func.hvp(fn, x, v, mode="reverse-over-reverse")[
        1
    ],
    "nested": lambda fn, x, v: slope(lambda x: slope(fn)(x).sum())(x),
    "jvp of a gradient": lambda fn, x, v: func.jvp(slope(fn), (x,), (v,))[1],
    "gradient of a jvp": lambda fn, x, v: slope(lambda x: func.jvp(fn, (x,), (v,))[1])(x),
    "linearize a gradient": lambda fn, x, v: func.linearize(slope(fn), x)[1](v),
    "jacobian of a gradient": lambda fn, x, v: func.per_loss_grads(slope(fn))(x).sum(0),
    "of samples": lambda fn, x, v: func.per_sample_grads(
        lambda p, s: slope(fn)(p * s).sum(), in_dims=(None, 0)
    )(x, torch.ones(2, 2, dtype=D, device=x.device))[0],
    "eager code around": lambda fn, x, v: gradkit.value_and_grads(
        slope(fn)(leaf := x.clone().requires_grad_()).sum(), leaf
    )[1],
}


def second_derivative(x: Tensor) -> Tensor:
    return 2 * x.exp() * x.cos()


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("call", SECOND)
def test_the_second_derivative_is_right_in_every_call(
    device: torch.device, kind: str, call: str
) -> None:
    x = torch.tensor([0.5, 1.0], dtype=D, device=device)
    made = MAKE[kind](x)
    before = torch._C._get_graph_executor_optimize()
    for _ in range(4):
        ours = SECOND[call](lambda x: made(x).sum(), x, torch.ones_like(x))
        torch.testing.assert_close(ours.detach(), second_derivative(x))
    assert torch._C._get_graph_executor_optimize() == before


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("call", SECOND)
@pytest.mark.parametrize("checked", [False, True])
def test_what_torch_has_compiled_before_is_right_or_refused(
    device: torch.device, kind: str, call: str, checked: bool
) -> None:
    x = torch.tensor([0.5, 1.0], dtype=D, device=device)
    made = MAKE[kind](x)
    for _ in range(3):
        made(x.clone().requires_grad_()).sum().backward()

    def run() -> Any:
        return SECOND[call](lambda x: made(x).sum(), x, torch.ones_like(x))

    for _ in range(4):
        try:
            if checked:
                with gradkit.checked():
                    ours = run()
            else:
                ours = run()
        except (gradkit.UnsupportedGraphError, gradkit.DetachedLossError) as error:
            refused = str(error)
        else:
            refused = ""
            torch.testing.assert_close(ours.detach(), second_derivative(x))
        # By eager code, a loss is refused as a constant if the gradient is all that it is of.
        assert not refused or "torch.jit" in refused or call == "eager code around"


@pytest.mark.parametrize("kind", MAKE)
def test_the_mended_call(device: torch.device, kind: str) -> None:
    """Outside of a transform, torch differentiates what it has compiled."""
    x = torch.tensor([0.5, 1.0], dtype=D, device=device, requires_grad=True)
    made = MAKE[kind](x.detach())
    for _ in range(4):
        _, grad = gradkit.value_and_grads(made(x).sum(), x, create_graph=True)
        torch.testing.assert_close(gradkit.value_and_grads(grad.sum(), x)[1], second_derivative(x))
        _, first = func.value_and_grads(lambda x: made(x).sum())(x.detach())
        torch.testing.assert_close(first, grad.detach())


def test_the_executor_is_put_back_after_an_error(device: torch.device) -> None:
    def fail(x: Tensor) -> Tensor:
        assert not torch._C._get_graph_executor_optimize()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        func.hvp(fail, torch.ones(2, device=device), torch.ones(2, device=device))
    assert torch._C._get_graph_executor_optimize()
