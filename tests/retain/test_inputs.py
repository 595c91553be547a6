"""safe_retain(..., inputs=True): what modules are called with, for K-FAC and ghost norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func, tree
from tests.helpers import assert_same_bits

F64 = torch.float64


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float, *, shift: Tensor | None = None) -> Tensor:
        return x * factor if shift is None else x * factor + shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(3, 4), nn.ReLU(inplace=True)
        self.scaled, self.last, self.idle = Scaled(), nn.Linear(4, 2), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        return self.last(self.scaled(self.scaled(h, 2.0), 3.0, shift=h))


def test_inputs_by_name(device: torch.device) -> None:
    model, x = Net().to(device), torch.randn(5, 3, device=device)
    with gradkit.safe_retain(model, "*", inputs=True) as kept:
        _, expected = gradkit.value_and_grads(model(x).square().sum(), model)
    assert list(kept.inputs.values) == list(kept.values)
    assert kept.inputs.values["first"] is x
    assert kept.inputs.grads["first"] is None  # data
    assert kept.inputs.passes["first"] == ()
    assert kept.inputs.values["idle"] is kept.inputs.grads["idle"] is None
    (h, two), (doubled, three, by_name) = kept.inputs.values["scaled"]
    assert (two, three) == (2.0, 3.0)
    assert doubled is kept.values["scaled"][0]
    assert by_name["shift"] is h
    of_h = kept.inputs.grads["scaled"][0]
    assert of_h[1] is None
    assert torch.equal(of_h[0], kept.inputs.grads["scaled"][1][2]["shift"])
    assert_same_bits([kept.inputs.grads["scaled"][1][0]], [kept.grads["scaled"][0]])
    last = kept.inputs.values["last"]
    torch.testing.assert_close(kept.grads["last"].T @ last, expected["last.weight"])
    torch.testing.assert_close(kept.inputs.grads["last"], kept.grads["last"] @ model.last.weight)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_of_a_recomputation_nothing_is_kept(device: torch.device) -> None:
    layer, x = nn.Linear(3, 3).to(device), torch.randn(2, 3, device=device, requires_grad=True)
    with gradkit.safe_retain(layer, "", inputs=True) as kept:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert kept.inputs.values[""] is x
    assert torch.equal(kept.inputs.grads[""], x.grad)


def test_without_inputs_there_are_none(device: torch.device) -> None:
    model, x = nn.Linear(2, 2).to(device), torch.ones(2, device=device, requires_grad=True)
    with gradkit.safe_retain(model, "") as kept:
        model(x).sum().backward()
    with pytest.raises(gradkit.OptionError, match=r"(?s)^inputs: .*inputs=True"):
        _ = kept.inputs
    cases: list[tuple[Any, str]] = [
        ({"tensors": x, "inputs": True}, "inputs: expected False beside tensors"),
        ({"tensors": model, "names": "", "inputs": 1}, "inputs: expected False or True"),
    ]
    for options, text in cases:
        with pytest.raises(gradkit.OptionError, match=text), gradkit.safe_retain(**options):
            pytest.fail("the block ran")
    assert not model._forward_pre_hooks


def test_hooks_on_inputs_are_gone_after_an_exception(device: torch.device) -> None:
    model, x = nn.Linear(2, 2).to(device), torch.ones(2, device=device, requires_grad=True)

    def fails() -> None:
        with gradkit.safe_retain(model, "", inputs=True):
            model(x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert not model._forward_pre_hooks
    assert not x._backward_hooks


def test_an_input_view_that_was_changed_raises(device: torch.device) -> None:
    model, x = nn.Linear(2, 2).to(device), torch.ones(3, 2, device=device, requires_grad=True)
    base = x * 1

    def block() -> None:
        with gradkit.safe_retain(model, "", inputs=True):
            model(base[:2])
            base.mul_(2)
            base.sum().backward()

    with pytest.raises(gradkit.UnsupportedGraphError, match="the input of ''"):
        block()


@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_ghost_norms(device: torch.device, shape: tuple[int, ...]) -> None:
    """The norms of per-sample gradients without these gradients; of sequences, too."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(device, F64)
    x = torch.randn(*shape, 4, device=device, dtype=F64)

    def loss_of_one(params: Any, x: Tensor) -> Tensor:
        return call(params, buffers, x)[0].square().sum()

    call, params, buffers = func.make_functional(model)
    per_sample = func.per_sample_grads(loss_of_one, create_graph=False)(params, x)
    with gradkit.safe_retain(model, ["0", "2"], inputs=True) as kept:
        gradkit.value_and_grads(model(x).square().sum(), model)
    squares = torch.zeros(6, device=device, dtype=F64)
    for name in kept.values:
        a, g = (x[name].reshape(6, -1, x[name].shape[-1]) for x in (kept.inputs.values, kept.grads))
        gram = (g @ g.mT) * (a @ a.mT + 1)  # of positions; 1 is the bias
        squares = squares + gram.sum((1, 2)).detach()
    torch.testing.assert_close(squares.sqrt(), tree.global_norm(per_sample, batch_dims=1))


def test_kronecker_factors(device: torch.device) -> None:
    """Those of the Fisher information of a linear layer with one sample are exact."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device, F64)
    x, count = torch.randn(1, 3, device=device, dtype=F64), 2
    with gradkit.safe_retain(model, ["0", "2"], inputs=True) as kept:
        log_p = functional.log_softmax(model(x), -1)[0]
        per_label = gradkit.per_loss_grads(log_p, model)
    p = log_p.exp().detach()
    for name in kept.values:
        a = functional.pad(kept.inputs.values[name].detach(), (0, 1), value=1.0)
        g = torch.cat(kept.passes[name])
        factor = torch.kron(g.T @ (p[:, None] * g), a.T @ a)
        rows = torch.cat([per_label[f"{name}.weight"], per_label[f"{name}.bias"][:, :, None]], -1)
        rows = rows.reshape(count, -1)
        torch.testing.assert_close(factor, rows.T @ (p[:, None] * rows))
