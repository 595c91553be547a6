"""The page of libraries shows the results; the oracles tell what is wrong. No library is needed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.works_with import __main__ as runner
from tests.works_with import _oracles, _page

RESULTS = json.loads(runner.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_what_the_results_say(device: torch.device) -> None:
    assert _page.PAGE.read_text(encoding="utf-8") == _page.text(RESULTS)


def test_every_program_has_a_row(device: torch.device) -> None:
    assert sorted(RESULTS) == runner.names()
    assert len(RESULTS) >= 40


@pytest.mark.parametrize("name", runner.names())
def test_a_program_says_what_it_installs_and_tries(device: torch.device, name: str) -> None:
    assert _page.constant(name, "PIP")
    assert _page.about(name)


def test_what_is_no_longer_right_is_told(device: torch.device) -> None:
    old = {"outcomes": [{"what": "hvp", "gradkit": "right"}, {"what": "gone", "gradkit": "right"}]}
    new = {"outcomes": [{"what": "hvp", "gradkit": "refused: ..."}]}
    assert runner.worse(new, old) == ["hvp: refused: ..."]
    assert not runner.worse(old, new)


class Halved(torch.autograd.Function):
    """Cubes, and gives half of the gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x**3

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * 1.5 * x**2


def test_a_wrong_derivative_is_told(device: torch.device) -> None:
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, device=device)
    outcomes = list(_oracles.of_function(lambda x: Halved.apply(x).sum(), x))
    assert outcomes[0].torch == outcomes[0].gradkit == "wrong by 0.5"
    assert all(one.torch == "right" for one in _oracles.of_function(lambda x: (x**3).sum(), x))


def test_a_module_is_right_in_all_tries(device: torch.device) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    batch = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    outcomes = list(_oracles.of_module(make, batch, _oracles.mse))
    assert len(outcomes) == 6
    assert {word for one in outcomes for word in (one.torch, one.gradkit, one.checked)} == {"right"}


def test_a_refusal_is_told_with_its_reason(device: torch.device) -> None:
    def refuse() -> None:
        raise gradkit.StructureError("losses: expected one, got none.")

    outcome = _oracles.tried("x", torch.ones(1), lambda: torch.ones(1), refuse)
    assert outcome.gradkit == "refused: StructureError: losses: expected one, got none."
    assert _page.otherwise({"outcomes": [vars(outcome)]}) == ["x: refused (none.)"]
