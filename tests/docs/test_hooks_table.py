"""Which hooks run: the table in docs/moving_a_loop.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import gradkit

pytestmark = pytest.mark.usefixtures("device")

Call: TypeAlias = Callable[[Tensor, Tensor], Any]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "moving_a_loop.md"
ONE = torch.ones(2)


def hooks_of(call: Call, *, tensor_hook: bool = True) -> list[str]:
    """Return which hooks run, in their order."""
    log: list[str] = []
    weight = torch.nn.Parameter(torch.ones(2))
    layer = torch.nn.Identity()
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def step(weight: Tensor) -> None:
        before = weight.detach().clone()
        optimizer.step()
        weight.grad = None
        log.append("did not step" if torch.equal(weight, before) else "stepped")

    layer.register_full_backward_hook(lambda *_: log.append("module"))
    if tensor_hook:
        weight.register_hook(lambda grad: log.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda weight: log.append("accumulated"))
    weight.register_post_accumulate_grad_hook(step)
    call(layer(weight * 2).sum(), weight)
    return log


def captured_backward(loss: Tensor, weight: Tensor) -> None:
    with gradkit.capture_grads(weight) as captured:
        loss.backward()
    assert captured.grads is None  # the optimizer has cleared it


def add_with_hooks(loss: Tensor, weight: Tensor) -> None:
    gradkit.add_grads_(weight, ONE, hooks=True)


EVERYTHING = ["module", "tensor", "accumulated", "stepped"]
ROWS: dict[str, tuple[Call, list[str]]] = {
    "`loss.backward()`": (lambda loss, w: loss.backward(), EVERYTHING),
    "`backward_`": (lambda loss, w: gradkit.backward_(loss), EVERYTHING),
    "`value_and_grads`, `simultaneous_grads`, `vjp`": (gradkit.value_and_grads, EVERYTHING[:2]),
    "`per_loss_grads`": (
        lambda loss, w: gradkit.per_loss_grads([loss, loss], w),
        EVERYTHING[:2] * 2,
    ),
    "`write_grads_`": (lambda loss, w: gradkit.write_grads_(w, ONE), []),
    "`add_grads_`": (lambda loss, w: gradkit.add_grads_(w, ONE), []),
    "`step_`": (lambda loss, w: gradkit.step_(torch.optim.SGD([w]), w, ONE), []),
    "`capture_grads` around `.backward()`": (captured_backward, EVERYTHING),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_which_hooks_run(name: str) -> None:
    call, expected = ROWS[name]
    assert hooks_of(call) == expected
    table = PAGE.read_text(encoding="utf-8").partition("## Which hooks run")[2]
    (cells,) = re.findall(rf"(?m)^\| {re.escape(name)} \| (.*) \|$", table)
    names = ("tensor", "accumulated", "module", "stepped")
    said = [cell.startswith(("run", "steps")) for cell in cells.split(" | ")]
    assert said == [name in expected for name in names]


def product(loss: Tensor, weight: Tensor) -> None:
    gradkit.vjp(loss, weight, torch.ones_like(loss))


@pytest.mark.parametrize("call", [gradkit.simultaneous_grads, product])
def test_further_calls_are_as_value_and_grads(call: Call) -> None:
    assert hooks_of(call) == EVERYTHING[:2]


def test_add_grads_with_hooks_runs_those_of_leaves_or_raises() -> None:
    assert hooks_of(add_with_hooks, tensor_hook=False) == ["accumulated", "stepped"]
    with pytest.raises(gradkit.UnsupportedGraphError, match="tensor hooks"):
        hooks_of(add_with_hooks)


def test_a_pass_visits_the_nodes_that_its_parameters_need() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    log: list[str] = []
    for name, module in model.named_children():
        module.register_full_backward_hook(lambda *_, name=name: log.append(name))
    x = torch.randn(4, 3, requires_grad=True)
    gradkit.value_and_grads(model(x).sum(), {"x": x, "model": model})
    assert log == ["2", "1", "0"]

    log.clear()
    gradkit.value_and_grads(model(x).sum(), model[2])
    assert log == []
    model(x).sum().backward(inputs=list(model[2].parameters()))
    assert log == []
