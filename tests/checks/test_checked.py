"""`checked`: every gradient is right, and what wrote on one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import Scribble, assert_same_bits


def clip(grad: Tensor) -> None:
    grad.mul_(10)


def clip_data(grad: Tensor) -> None:
    grad.data.mul_(10)


def clip_list(grad: Tensor) -> None:
    torch._foreach_mul_([grad], 10)


def clip_out(grad: Tensor) -> None:
    torch.mul(grad, 10, out=grad)


def clip_several(grad: Tensor) -> None:
    parts = (grad / 10, grad * 10)
    torch.aminmax(torch.stack(parts), dim=0, out=(torch.empty_like(grad), grad))


@pytest.mark.parametrize("hook", [clip, clip_data, clip_list, clip_out, clip_several])
def test_a_hook_is_named_with_its_line_and_spoils_nothing(
    device: torch.device, hook: Callable[[Tensor], None]
) -> None:
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    z = a * 1
    z.register_hook(hook)
    loss = ((z + b) * torch.ones(2, device=device)).sum()
    where = rf"params\['b'\]: {hook.__name__} \(.*test_checked.py, line \d+\) wrote .* after"
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=where):
        _, grads = gradkit.value_and_grads(loss, {"a": a, "b": b})
    assert grads["a"].tolist() == [10, 10]
    assert grads["b"].tolist() == [1, 1]


def test_a_module_s_hook_is_named_with_the_module(device: torch.device) -> None:
    layer = nn.Linear(2, 2).to(device)
    x, other = (torch.ones(1, 2, device=device, requires_grad=True) for _ in range(2))

    def scale(module: nn.Module, grads: object, outputs: tuple[Tensor, ...]) -> None:
        outputs[0].mul_(3)

    layer.register_full_backward_hook(scale)
    loss = (layer(x * 1) + other).square().sum()
    match = r"params\['other'\]: a backward hook of Linear, .*scale"
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=match):
        _, grads = gradkit.value_and_grads(loss, {"other": other, "x": x})
    assert_same_bits([grads["other"]], [2 * (layer(x) + other).detach()])


def test_functions_non_leaves_and_each_of_several_losses(device: torch.device) -> None:
    a, w = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    y = Scribble.apply(w)
    losses = {"one": ((a + y) * torch.ones(2, device=device)).sum(), "two": (a * 3).sum()}
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match=r"Scribble.backward \("):
        rows = gradkit.per_loss_grads(losses, {"a": a, "y": y, "w": w})
    assert {name: None if g is None else g.tolist() for name, g in rows["one"].items()} == {
        "a": [1, 1], "y": [1, 1], "w": [7, 7],
    }  # fmt: skip
    assert rows["two"]["a"].tolist() == [3, 3]


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_writes(device: torch.device) -> None:
    layer = nn.Linear(2, 2).to(device)
    layer.weight.register_hook(lambda grad: grad * 2)
    x = torch.ones(3, 2, device=device)
    with gradkit.checked():
        _, ours = gradkit.value_and_grads(layer(x)[:, torch.tensor([0, 0])].sum(), layer)
    _, plain = gradkit.value_and_grads(layer(x)[:, torch.tensor([0, 0])].sum(), layer)
    assert_same_bits(ours.values(), plain.values())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True 1"), ("0", "False 0"), ("", "False 0")]
)
def test_the_environment_variable(device: torch.device, value: str, expected: str) -> None:
    code = (
        "from gradkit._checks.checked import is_checked; from torch.optim import optimizer; "
        "print(is_checked(), len(optimizer._global_optimizer_post_hooks))"
    )
    environment = {**os.environ, "GRADKIT_CHECKED": value}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
