"""Results share no memory with what they were computed from, and what has changed since is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import gradkit
from gradkit import func
from tests.helpers import unchanged


@pytest.mark.parametrize("change", ["add_", "step_"])
def test_a_pull_after_a_primal_has_changed_raises(device: torch.device, change: str) -> None:
    w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    values, pull = func.vjp(lambda tree: tree["w"] ** 3, {"w": w})
    ones = torch.ones_like(values)
    (before,) = pull(ones)
    assert before["w"].tolist() == [3, 12]
    with torch.no_grad():
        if change == "add_":
            w.add_(1)
        else:
            gradkit.step_(torch.optim.SGD([w], lr=1.0), [w], [ones])
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"\['w'\].*as it was when"):
        pull(ones)
    push = func.linearize(lambda w: w**3, w)[1]
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(gradkit.UnsupportedGraphError, match="as it was when"):
        push(ones)


@pytest.mark.parametrize("fn", [torch.exp, torch.sigmoid, lambda w: w, lambda w: w.view(2, 1)])
def test_values_may_be_changed(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    w, along = torch.tensor([1.0, 2.0], device=device), torch.ones(2, device=device)
    with unchanged(w, along):
        expected = torch.func.vjp(fn, w)[1](torch.ones_like(fn(w)))[0]
        values, pull, aux = func.vjp(lambda w: (fn(w), w), w, has_aux=True)
        ones = torch.ones_like(values)
        values.zero_(), aux.zero_()
        assert torch.equal(pull(ones)[0], expected)
        values, push = func.linearize(fn, w)
        values.zero_()
        assert torch.equal(push(along), torch.func.jvp(fn, (w,), (along,))[1])
        values, products, aux = func.jvp(lambda w: (fn(w), w), w, along, has_aux=True)
        values.zero_(), products.zero_(), aux.zero_()


def test_a_function_that_writes_on_its_arguments(device: torch.device) -> None:
    relu, w = nn.ReLU(inplace=True), torch.tensor([-1.0, 2.0], device=device)
    calls: list[Callable[[], object]] = [
        lambda: func.value_and_grads(lambda w: relu(w).sum())(w),
        lambda: func.per_loss_grads(lambda w: relu(w).sum())(w),
        lambda: func.per_sample_grads(lambda w, x: (relu(w) * x).sum())(w, torch.stack([w, w])),
        lambda: func.hvp(lambda w: relu(w).sum(), w, w),
        lambda: func.vjp(relu, w),
        lambda: func.linearize(relu, w),
    ]
    with unchanged(w):
        for call in calls:
            with pytest.raises(gradkit.UnsupportedGraphError, match="leaves its arguments as they"):
                call()
        along = torch.ones(2, device=device)
        with unchanged(along):
            values, products = func.jvp(relu, w, along)  # works on copies
        assert values.tolist() == [0, 2]
        assert products.tolist() == [0, 1]


def fourth(w: Tensor) -> Tensor:
    return (w**4).sum()


@pytest.mark.parametrize("grad_mode", [True, False])
def test_results_have_the_tangents_of_forward_mode_around_them(
    device: torch.device, grad_mode: bool
) -> None:
    options: Any = {"dtype": torch.float64, "device": device}
    w, along = torch.tensor([1.0, 2.0], **options), torch.tensor([1.0, 0.5], **options)
    one = torch.tensor(1.0, **options)
    calls: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "value_and_grads": (lambda w: func.value_and_grads(fourth)(w)[1], torch.func.grad(fourth)),
        "per_loss_grads": (func.per_loss_grads(fourth), torch.func.grad(fourth)),
        "vjp": (lambda w: func.vjp(fourth, w)[1](one)[0], torch.func.grad(fourth)),
        "linearize": (
            lambda w: func.linearize(fourth, w)[1](along),
            lambda w: torch.func.grad(fourth)(w) @ along,
        ),
    }
    for name, (ours, theirs) in calls.items():
        expected = torch.func.jvp(theirs, (w,), (along,))[1]
        with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
            tangent = forward_ad.unpack_dual(ours(forward_ad.make_dual(w, along))).tangent
        assert tangent is not None, name
        torch.testing.assert_close(tangent, expected)


def test_a_recurrent_network_under_no_grad(device: torch.device) -> None:
    """Below a level, the kernel of the CPU would keep nothing for its backward pass."""
    network, x = nn.LSTM(4, 3).to(device), torch.randn(5, 2, 4, device=device)
    call, params, buffers = func.make_functional(network)

    def loss(params: Any) -> Tensor:
        return call(params, buffers, x)[0][0].square().sum()

    expected = func.value_and_grads(loss)(params)[1]
    with torch.no_grad():
        for grads in (
            func.value_and_grads(loss)(params)[1],
            func.per_loss_grads(loss)(params),
            func.vjp(loss, params)[1](torch.ones((), device=device))[0],
            func.hvp(loss, params, params, mode="reverse-over-reverse")[0],
        ):
            assert not any(grad.requires_grad for grad in grads.values())
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected[name])
        product = func.ggn_vp(lambda p: call(p, buffers, x)[0][0], torch.sum, params, params)[1]
        assert not any(map(torch.any, product.values()))
