"""Tensors from outside that require grad are refused where their gradient would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import gradkit
from gradkit import meta
from tests.helpers import unchanged

D = torch.float64
recomputing = pytest.mark.parametrize("memory", ["recompute", 1, 2])
refused = pytest.raises(gradkit.UnsupportedGraphError, match="from outside that requires grad")


class Square(Function):
    """The sum of squares, whose backward uses a tensor that its forward does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.holder = holder
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return cotangent * 2 * ctx.saved_tensors[0] * ctx.holder[0], None


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def by_function(w: Tensor, s: Tensor) -> Tensor:
    return Square.apply(w, [s])


def by_hook(w: Tensor, s: Tensor) -> Tensor:
    h = w * 1.0
    h.register_hook(lambda g: g * s)
    return h.square().sum()


def by_hook_of_module(w: Tensor, s: Tensor) -> Tensor:
    module = Identity()
    module.register_full_backward_hook(lambda _, grads, __: (grads[0] * s,))
    return module(w).square().sum()


in_backward = pytest.mark.parametrize("square", [by_function, by_hook, by_hook_of_module])


def leaf(value: float, device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=D, device=device, requires_grad=True)


@recomputing
@in_backward
def test_a_tensor_that_only_the_backward_of_a_step_uses(
    device: torch.device, memory: Any, square: Callable[..., Tensor]
) -> None:
    w, s = leaf(1.5, device, 2), leaf(2.0, device)
    opt, data = meta.sgd(lr=0.1), [0] * 4
    with unchanged(w, s), refused:
        meta.unroll(lambda w, *_: square(w, s), w, data, opt, memory=memory)
    passed, stored = (
        meta.unroll(lambda w, s, _: square(w, s), w, data, opt, outer=s, memory=way)
        for way in (memory, "store")
    )
    if square is by_function:
        ours, expected = (torch.autograd.grad(one.params.sum(), [s, w]) for one in (passed, stored))
        assert expected[0] != 0
        torch.testing.assert_close(ours, expected)
    else:  # the hook would run again in the derivative of what it has changed
        for one in (passed, stored):
            with pytest.raises(gradkit.UnsupportedGraphError, match="would change again"):
                gradkit.value_and_grads(one.params.sum(), [s, w])
    constant = meta.unroll(
        lambda w, *_: square(w, s), w, data, opt, memory=memory, first_order=True
    )
    assert constant.params.isfinite().all()


@in_backward
def test_a_tensor_that_only_the_slope_of_an_inner_loss_uses(
    device: torch.device, square: Callable[..., Tensor]
) -> None:
    s, o = leaf(2.0, device), leaf(1.0, device)

    def solver(w: Tensor, outer: Any) -> Tensor:
        return torch.full_like(w, 0.25)  # where 2 s w = o

    def inner(w: Tensor, outer: Any) -> Tensor:
        return square(w, outer[1]) - outer[0] * w.sum()

    start = torch.zeros(1, dtype=D, device=device)
    with refused:
        meta.implicit(solver, lambda w, o: inner(w, (o, s)))(start, o)
    found = meta.implicit(solver, inner)(start, (o, s))
    if square is not by_function:  # torch would run the hook again in the derivative of the slope
        with pytest.raises(gradkit.UnsupportedGraphError, match="would change again"):
            torch.autograd.grad(found, [o, s])
    else:
        grads = torch.autograd.grad(found, [o, s])
        torch.testing.assert_close(torch.stack(grads), torch.tensor([0.25, -0.125]).to(grads[0]))


def penalized(w: Tensor, s: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = (x @ w).tanh().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + s * slope.square().sum()


@recomputing
def test_a_leaf_that_the_loss_makes(device: torch.device, memory: Any) -> None:
    w, s = leaf(0.3, device, 2), leaf(0.5, device)
    xs = [torch.full((3, 2), 0.1 * k, dtype=D, device=device) for k in range(4)]
    grads = []
    for way in (memory, "store"):
        adapted = meta.unroll(penalized, w, xs, meta.sgd(lr=0.1), outer=s, memory=way)
        grads.append(torch.autograd.grad(adapted.params.square().sum(), [w, s], create_graph=True))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=0)
    again = [torch.autograd.grad(by_w.sum() + by_s, [w, s]) for by_w, by_s in grads]
    torch.testing.assert_close(again[0], again[1], rtol=1e-12, atol=0)


@recomputing
@pytest.mark.parametrize("way", ["outside", "parameter"])
def test_what_cannot_be_told_from_a_leaf_outside(
    device: torch.device, memory: Any, way: str
) -> None:
    w, before = leaf(0.3, device, 2), leaf(0.5, device, 2)

    def loss(w: Tensor, *_: Any) -> Tensor:
        extra = nn.Parameter(w.detach()) if way == "parameter" else before.requires_grad_()
        return (w * extra).square().sum()

    with unchanged(w, before), refused:
        meta.unroll(loss, w, [0] * 2, meta.sgd(lr=0.1), memory=memory)


def test_a_leaf_that_the_inner_loss_makes(device: torch.device) -> None:
    s = leaf(0.5, device)

    def inner(w: Tensor, s: Tensor) -> Tensor:
        x = torch.ones_like(w).requires_grad_()
        (slope,) = torch.autograd.grad((x * w).square().sum(), x, create_graph=True)  # 2 x w ** 2
        return (w - 1).square().sum() + s * slope.sum()

    find = meta.implicit(lambda w, s: torch.ones_like(w) / (1 + 2 * s), inner)
    w = find(torch.zeros(2, dtype=D, device=device), s)
    torch.testing.assert_close(torch.autograd.grad(w[0], s)[0], -2 / (1 + 2 * s.detach()) ** 2)


@pytest.mark.parametrize("memory", ["recompute", 1])
def test_a_leaf_that_is_made_once_and_kept_is_refused(device: torch.device, memory: Any) -> None:
    """It is made during the first run, and a tensor from outside from then on."""
    kept: dict[str, Tensor] = {}

    def loss(w: Tensor, *_: Any) -> Tensor:
        if "scale" not in kept:
            kept["scale"] = torch.ones((), device=device, requires_grad=True)
        return ((w - kept["scale"]) ** 2).sum()

    w = torch.zeros(2, device=device, requires_grad=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="from outside"):
        meta.unroll(loss, w, [0], meta.sgd(lr=0.1), memory=memory)
    kept.clear()
    outer = torch.ones((), device=device, requires_grad=True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="from outside"):
        meta.implicit(lambda w, o: w + o, loss)(w, outer)
