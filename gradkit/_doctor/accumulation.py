"""Users' programs with backward() and autograd.grad, and the same with gradkit.

The programs are plain torch, as people write them; they run to show what torch does here.
"""

# loss.backward() has no types in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd

import gradkit
from gradkit._doctor.checks import FREED, Observation, check, error_of, leaf

UNUSED = "appears to not have been used in the graph"


def other_losses(device: torch.device) -> Observation:
    """Run backward() for losses that each use one of two tensors."""
    w, v = leaf(device, 1, 2), leaf(device, 3, 4)
    (w * w).sum().backward()
    (v * v).sum().backward()
    after_both = check("w.grad after a loss of w, and one of v", w.grad, 2 * w)
    (w * w).sum().backward()
    after_third = check("after a second loss of w", w.grad, 4 * w)
    losses = {"of w": (w * w).sum(), "of v": (v * v).sum()}
    grads = gradkit.per_loss_grads(losses, {"w": w})
    return Observation(
        torch=[after_both, after_third],
        gradkit=[
            check("the loss of w, with respect to w", grads["of w"]["w"], 2 * w),
            check("the loss of v, with respect to w", grads["of v"]["w"], None),
        ],
    )


def unused(device: torch.device) -> Observation:
    """Differentiate a loss with respect to a tensor that it does not use."""
    w, v = leaf(device, 1, 2), leaf(device, 3, 4)
    loss = (v * v).sum()
    unused_error = error_of(lambda: autograd.grad(loss, [v, w]), UNUSED)
    freed_error = error_of(loss.backward, FREED)
    loss, params = (v * v).sum(), {"v": v, "w": w}

    def require_all() -> None:
        gradkit.value_and_grads(loss, params, unused="error")

    named_error = error_of(require_all, "params['w']")
    _, none = gradkit.value_and_grads(loss, params, retain_graph=True)
    _, zeros = gradkit.value_and_grads(loss, params, unused="zeros")
    return Observation(
        torch=[
            check("autograd.grad", unused_error, f"RuntimeError: {UNUSED}"),
            check("and then backward()", freed_error, f"RuntimeError: {FREED}"),
        ],
        gradkit=[
            check('unused="error"', named_error, "UnreachedParamError: params['w']"),
            check("after that the graph still runs: with respect to w", none["w"], None),
            check('unused="zeros", with respect to w', zeros["w"], torch.zeros_like(w)),
        ],
    )


def freed(device: torch.device) -> Observation:
    """Run a second pass through a freed graph."""
    w = leaf(device, 1, 2)
    square, cube = (w * w).sum(), (w * w * w).sum()
    square.backward()
    cube.backward()
    freed_error = error_of(lambda: autograd.grad(square, w), FREED)
    losses = {"1": (w * w).sum(), "2": (w * w * w).sum()}
    grads = gradkit.per_loss_grads(losses, w)
    text = "ask for all gradients in one call"
    named_error = error_of(lambda: gradkit.value_and_grads(losses["1"], w), text)
    return Observation(
        torch=[check("autograd.grad after backward()", freed_error, f"RuntimeError: {FREED}")],
        gradkit=[
            check("both from one call", grads, {"1": 2 * w, "2": 3 * w * w}),
            check("a second call", named_error, f"FreedGraphError: {text}"),
        ],
    )


def same_engine(device: torch.device) -> Observation:
    """Compare the bits that backward(), autograd.grad and gradkit give."""
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
    in_turn: Any = w.grad
    _, result = gradkit.value_and_grads(losses(), w)
    result_in_turn = gradkit.tree.add(*gradkit.per_loss_grads(losses(), w))
    close = torch.allclose(joint, in_turn, rtol=1e-5, atol=1e-6)
    return Observation(
        torch=[
            check("autograd.grad has the bits of backward()", torch.equal(by_grad, joint), True),
            check("two passes added up: equal up to rounding", close, True),
        ],
        gradkit=[
            check("value_and_grads has them", torch.equal(result, joint), True),
            check("per_loss_grads has those of two", torch.equal(result_in_turn, in_turn), True),
        ],
    )


def shared(device: torch.device) -> Observation:
    """Add up the gradients of two losses of one parameter."""
    w = leaf(device, 1, 2)
    first, second = (w * w).sum(), (3 * w).sum()
    each = [autograd.grad(loss, w, retain_graph=True)[0] for loss in (first, second)]
    first.backward()
    second.backward()
    total = check("w.grad after both", w.grad, 2 * w + 3)
    grads = gradkit.per_loss_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    _, joint = gradkit.value_and_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    return Observation(
        torch=[check("autograd.grad of each", each, [2 * w, torch.full_like(w, 3)]), total],
        gradkit=[
            check("tree.add of both", gradkit.tree.add(*grads)["w"], 2 * w + 3),
            check("the joint call", joint["w"], 2 * w + 3),
        ],
    )


def zero_grad(device: torch.device) -> Observation:
    """Run two steps, without zeroing the gradients in between."""
    w = leaf(device, 1, 2)
    (w * w).sum().backward()
    (w * w).sum().backward()
    added = check("w.grad after two equal steps", w.grad, 4 * w)
    w.grad = None
    for _ in range(2):
        _, grad = gradkit.value_and_grads((w * w).sum(), w)
    second = check("the gradient of the second step", grad, 2 * w)
    return Observation(torch=[added], gradkit=[second, check("w.grad", w.grad, None)])
