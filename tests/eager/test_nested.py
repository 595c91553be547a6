"""Gradients of nested tensors, whose rows differ in length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from tests.helpers import unchanged

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
LAYOUTS = ["jagged", "strided"]


@pytest.fixture(params=["no hook", "a hook"])
def _hook(request: pytest.FixtureRequest) -> None:
    if request.param == "a hook":
        torch.ones(1, requires_grad=True).register_hook(lambda grad: None)


def nested(layout: str, device: torch.device) -> Tensor:
    parts = [torch.randn(2, 3, device=device), torch.randn(1, 3, device=device)]
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout)).requires_grad_()


def loss_of(x: Tensor) -> Tensor:
    square = x * x
    if x.layout == torch.jagged:
        return square.values().sum()
    return torch.nested.to_padded_tensor(square, 0.0).sum()


def same_parts(ours: Tensor, theirs: Tensor) -> bool:
    return all(map(torch.equal, ours.unbind(), theirs.unbind()))


@pytest.mark.usefixtures("_hook")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_torch(device: torch.device, layout: str) -> None:
    x = nested(layout, device)
    loss = loss_of(x)
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    _, grad = gradkit.value_and_grads(loss, x, retain_graph=True)
    assert same_parts(grad, expected)
    losses = {"a": loss, "b": 2 * loss}
    by_loss = gradkit.per_loss_grads(losses, x, retain_graph=True)
    assert same_parts(by_loss["a"], expected)
    assert same_parts(by_loss["b"], 2 * expected)
    other = torch.ones(2, device=device, requires_grad=True)
    _, grads = gradkit.value_and_grads(other.sum(), [x, other], unused="zeros")
    assert same_parts(grads[0], expected * 0)


CALLS: dict[str, Any] = {
    "gram": lambda x: gradkit.gram([loss_of(x), loss_of(x)], x),
    "per_loss_norms": lambda x: gradkit.per_loss_norms([loss_of(x)], x),
    "per_sample_norms": lambda x: gradkit.per_sample_norms(loss_of(x).expand(2), x),
    "clipped_sum": lambda x: gradkit.clipped_sum(loss_of(x).expand(2), x, 1.0),
    "func": lambda x: gradkit.func.value_and_grads(loss_of)(x),
    "vjp": lambda x: gradkit.func.vjp(loss_of, x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_what_torch_cannot_do_is_refused(device: torch.device, name: str, layout: str) -> None:
    x = nested(layout, device)
    errors = (gradkit.UnsupportedGraphError, gradkit.LeafTypeError)
    with unchanged(), pytest.raises(errors, match=r"nested|jagged"):
        CALLS[name](x)
    assert x.grad is None


def test_norms_of_nested_tensors(device: torch.device) -> None:
    x = nested("jagged", device).detach()
    right = x.values().norm()
    torch.testing.assert_close(gradkit.tree.global_norm(x), right)
    torch.testing.assert_close(gradkit.tree.dot(x, x), right**2)
