"""What backward() and autograd.grad do, tried out; and what gradkit gives in their place."""

# loss.backward() has no types in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd

import gradkit
from gradkit._doctor._check import FREED, Seen, check, error_of, leaf

UNUSED = "appears to not have been used in the graph"


def other_losses(device: torch.device) -> Seen:
    """Return what a loss does to the gradient of a tensor that it does not use."""
    w, v = leaf(device, 1, 2), leaf(device, 3, 4)
    (w * w).sum().backward()
    (v * v).sum().backward()
    after_both = check("w.grad after a loss of w, and one of v", w.grad, 2 * w)
    (w * w).sum().backward()
    after_third = check("after a second loss of w", w.grad, 4 * w)
    losses = {"of w": (w * w).sum(), "of v": (v * v).sum()}
    grads = gradkit.per_loss_grads(losses, {"w": w})
    return Seen(
        torch=[after_both, after_third],
        gradkit=[
            check("the loss of w, by w", grads["of w"]["w"], 2 * w),
            check("the loss of v, by w", grads["of v"]["w"], None),
        ],
    )


def unused(device: torch.device) -> Seen:
    """Return what differentiating by an unused tensor gives."""
    w, v = leaf(device, 1, 2), leaf(device, 3, 4)
    loss = (v * v).sum()
    asked = error_of(lambda: autograd.grad(loss, [v, w]), UNUSED)
    then = error_of(loss.backward, FREED)
    loss, params = (v * v).sum(), {"v": v, "w": w}

    def strictly() -> None:
        gradkit.value_and_grads(loss, params, unused="error")

    refused = error_of(strictly, "params['w']")
    _, none = gradkit.value_and_grads(loss, params, retain_graph=True)
    _, zeros = gradkit.value_and_grads(loss, params, unused="zeros")
    return Seen(
        torch=[
            check("autograd.grad", asked, f"RuntimeError: {UNUSED}"),
            check("and then backward()", then, f"RuntimeError: {FREED}"),
        ],
        gradkit=[
            check('unused="error"', refused, "UnreachedParamError: params['w']"),
            check("after that, the graph still runs, by w", none["w"], None),
            check('unused="zeros", by w', zeros["w"], torch.zeros_like(w)),
        ],
    )


def freed(device: torch.device) -> Seen:
    """Return what a second pass through a graph gives."""
    w = leaf(device, 1, 2)
    square, cube = (w * w).sum(), (w * w * w).sum()
    square.backward()
    cube.backward()
    again = error_of(lambda: autograd.grad(square, w), FREED)
    losses = {"1": (w * w).sum(), "2": (w * w * w).sum()}
    grads = gradkit.per_loss_grads(losses, w)
    words = "ask for all gradients in one call"
    late = error_of(lambda: gradkit.value_and_grads(losses["1"], w), words)
    return Seen(
        torch=[check("autograd.grad after backward()", again, f"RuntimeError: {FREED}")],
        gradkit=[
            check("both from one call", grads, {"1": 2 * w, "2": 3 * w * w}),
            check("a second call", late, f"FreedGraphError: {words}"),
        ],
    )


def same_engine(device: torch.device) -> Seen:
    """Return whether the ways to a gradient have the same bits."""
    w = torch.linspace(-2, 2, 101, dtype=torch.float32, device=device).requires_grad_()

    def losses() -> list[Tensor]:
        h = w.tanh()
        return [(h * 0.3).exp().sum(), (h * h).logsumexp(0)]

    autograd.backward(losses())
    joint: Any = w.grad
    w.grad = None
    (by_grad,) = autograd.grad(losses(), w)
    for loss in losses():
        loss.backward(retain_graph=True)
    apart: Any = w.grad
    _, ours = gradkit.value_and_grads(losses(), w)
    ours_apart = gradkit.tree.add(*gradkit.per_loss_grads(losses(), w))
    close = torch.allclose(joint, apart, rtol=1e-5, atol=1e-6)
    return Seen(
        torch=[
            check("autograd.grad has the bits of backward()", torch.equal(by_grad, joint), True),
            check("two passes added up: equal to rounding", close, True),
        ],
        gradkit=[
            check("value_and_grads has them", ours is not None and torch.equal(ours, joint), True),
            check("per_loss_grads those of two", torch.equal(ours_apart, apart), True),
        ],
    )


def shared(device: torch.device) -> Seen:
    """Return what the losses of a shared parameter add up to."""
    w = leaf(device, 1, 2)
    first, second = (w * w).sum(), (3 * w).sum()
    each = [autograd.grad(loss, w, retain_graph=True)[0] for loss in (first, second)]
    first.backward()
    second.backward()
    total = check("w.grad after both", w.grad, 2 * w + 3)
    grads = gradkit.per_loss_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    _, joint = gradkit.value_and_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    return Seen(
        torch=[check("autograd.grad of each", each, [2 * w, torch.full_like(w, 3)]), total],
        gradkit=[
            check("tree.add of both", gradkit.tree.add(*grads)["w"], 2 * w + 3),
            check("the joint call", joint["w"], 2 * w + 3),
        ],
    )


def zero_grad(device: torch.device) -> Seen:
    """Return what a second step gives if nothing is zeroed."""
    w = leaf(device, 1, 2)
    (w * w).sum().backward()
    (w * w).sum().backward()
    added = check("w.grad after two equal steps", w.grad, 4 * w)
    w.grad = None
    for _ in range(2):
        _, grad = gradkit.value_and_grads((w * w).sum(), w)
    return Seen(
        torch=[added],
        gradkit=[check("the second step's", grad, 2 * w), check("w.grad", w.grad, None)],
    )
