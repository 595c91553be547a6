"""compare(order=2): Hessian-vector products against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gradkit
from gradkit.report import compare
from tests.helpers import same_bits, unchanged

MODES = {
    f"{mode}-over-reverse ({way})"
    for mode in ("reverse", "forward")
    for way in ("torch.autograd", "torch.func")
}


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).tanh().square().mean()


def test_all_modes_agree_where_torch_is_right(device: torch.device) -> None:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
    model = nn.Sequential(*layers).to(device)
    model[0].bias.requires_grad_(False)
    x = torch.randn(6, 3, device=device)
    before = [t.clone() for t in model.state_dict().values()]
    with unchanged(x, *model.parameters()):
        comparison = compare(mean_square, model, x, order=2)
    assert all(map(same_bits, before, model.state_dict().values()))
    assert comparison.products.keys() == MODES
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for errors in comparison.products.values():
        assert errors.keys() == trained
        assert max(errors.values()) < 1e-5
    assert "Hessian-vector products in float64" in str(comparison)


def test_what_is_wrong_shows_at_its_leaf(device: torch.device) -> None:
    class Gate(torch.autograd.Function):
        """x * y, whose second derivative by x is dropped."""

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def forward(x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, y = ctx.saved_tensors
            return g * y, (g * x).detach()

    params = {name: torch.randn(3, device=device, requires_grad=True) for name in "abc"}

    def loss(t: Any) -> Any:
        return {"gate": Gate.apply(t["a"], t["b"]).sum(), "rest": (t["c"] ** 3).sum()}

    comparison = compare(loss, params, order=2)
    errors = comparison.products["reverse-over-reverse (torch.func)"]
    assert errors["a"] > 1e-2
    assert errors["b"] < 1e-5
    assert errors["c"] < 1e-5
    assert "NotImplementedError" in comparison.refused["forward-over-reverse (torch.func)"]


def test_weight_norm(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the formula of the CPU is wrong")
    layer = weight_norm(nn.Linear(4, 3))
    comparison = compare(mean_square, layer, torch.randn(5, 4), order=2)
    for errors in comparison.products.values():
        assert errors["parametrizations.weight.original1"] > 1e-3


def test_a_tied_tensor_is_one_variable(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    tree = {"a": w, "b": w}
    comparison = compare(lambda t: (t["a"] ** 3 * t["b"]).sum(), tree, order=2)
    for errors in comparison.products.values():
        assert errors["a"] == errors["b"] < 1e-5


def test_order_is_one_or_two(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    assert compare(torch.sum, w).products == {}
    with pytest.raises(gradkit.OptionError, match="order"):
        compare(torch.sum, w, order=3)
