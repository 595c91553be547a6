"""What retain_grad(), retain_graph and create_graph do, tried out; and what gradkit gives."""

# loss.backward() has no types in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings

import torch
from torch import Tensor, autograd

import gradkit
from gradkit._doctor._check import FREED, Seen, check, error_of, leaf


def branches(device: torch.device) -> Seen:
    """Return the gradient of a tensor with two uses."""
    w = leaf(device, 1, 2)
    h = w * 2
    (h.sum() + (h * h).sum()).backward()
    without = check("w.grad without retain_grad()", w.grad, 2 + 8 * w)
    w.grad = None
    h = w * 2
    h.retain_grad()
    (h.sum() + (h * h).sum()).backward()
    same = check("w.grad with it", w.grad, 2 + 8 * w)
    summed = check("h.grad, over both branches", h.grad, 1 + 2 * h)
    h = w * 2
    with gradkit.safe_retain(h) as kept:
        gradkit.value_and_grads(h.sum() + (h * h).sum(), w)
    h = w * 2
    branches = gradkit.per_loss_grads([h.sum(), (h * h).sum()], h)
    return Seen(
        torch=[without, same, summed],
        gradkit=[
            check("safe_retain, over both", kept.grads, 1 + 2 * h),
            check("each branch", branches, [torch.ones_like(h), 2 * h]),
        ],
    )


def position(device: torch.device) -> Seen:
    """Return what keeping a gradient gives, by where it is asked for."""
    w = leaf(device, 1, 2)
    h = w * 2
    loss = (h * h).sum()
    h.retain_grad()
    loss.backward()
    late = check("after the use, h.grad", h.grad, 2 * h)
    h = w * 2
    (h * h).sum().backward()
    h.retain_grad()
    too_late = check("after the pass, h.grad", h.grad, None)
    h = w * 2
    with gradkit.safe_retain(h) as before:
        gradkit.value_and_grads((h * h).sum(), w)
    h = w * 2
    loss = (h * h).sum()
    with gradkit.safe_retain(h) as after:
        gradkit.value_and_grads(loss, w)
    refused = error_of(lambda: _change_below_a_view(w * 2), "changed in place")
    return Seen(
        torch=[late, too_late],
        gradkit=[
            check("before the use", before.grads, 2 * h),
            check("after the use", after.grads, 2 * h),
            check("where it would be lost", refused, "UnsupportedGraphError: changed in place"),
        ],
    )


def _change_below_a_view(h: Tensor) -> None:
    with gradkit.safe_retain(h[:1]):
        h.add_(1)
        (h * h).sum().backward()


def not_a_leaf(device: torch.device) -> Seen:
    """Return the gradient of a tensor that nobody retained."""
    w = leaf(device, 1, 2)
    y = w * 2
    y.sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nothing = check("y.grad", y.grad, None)
    warned = any("is not a leaf Tensor is being accessed" in str(w.message) for w in caught)
    y = w * 2
    with gradkit.safe_retain({"y": y}) as kept:
        y.sum().backward()
    return Seen(
        torch=[nothing, check("with a warning", warned, True)],
        gradkit=[check("safe_retain", kept.grads, {"y": torch.ones_like(y)})],
    )


def twice(device: torch.device) -> Seen:
    """Return what a second pass gives after retain_grad()."""
    w = leaf(device, 1, 2)
    h = w * 2
    h.retain_grad()
    loss = (h * h).sum()
    loss.backward()
    again = error_of(loss.backward, FREED)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    w.grad = None
    loss.backward()
    kept = check("with retain_graph=True, w.grad", w.grad, 2 * w)
    h = w * 2
    grads = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    return Seen(
        torch=[check("backward() twice", again, f"RuntimeError: {FREED}"), kept],
        gradkit=[check("two passes in one call", grads, [torch.full_like(w, 2), 8 * w])],
    )


def create_graph(device: torch.device) -> Seen:
    """Return the gradients of several losses without create_graph."""
    w = leaf(device, 1, 2)
    h = w * 2
    first, second = h.sum(), (h * h).sum()
    theirs = [*autograd.grad(first, w, retain_graph=True), *autograd.grad(second, w)]
    h = w * 2
    ours = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    _, slope = gradkit.value_and_grads((w**3).sum(), w, create_graph=True)
    assert slope is not None
    _, second_order = gradkit.value_and_grads(slope.sum(), w)
    right = [torch.full_like(w, 2), 8 * w]
    return Seen(
        torch=[
            check("without it, both", theirs, right),
            check("they carry a graph", any(g.requires_grad for g in theirs), False),
        ],
        gradkit=[
            check("without it, both", ours, right),
            check("they carry a graph", any(g.requires_grad for g in ours), False),
            check("with it, a derivative of one", second_order, 6 * w),
        ],
    )


def in_place(device: torch.device) -> Seen:
    """Return what is kept of a tensor that is changed in place."""
    w = leaf(device, 1, 2)
    h = w * 2
    h.retain_grad()
    early = (3 * h).sum()
    h.mul_(5)
    (early + h.sum()).backward()
    moved = check("h.grad, of the new value only", h.grad, torch.ones_like(w))
    h = w * 2
    with gradkit.safe_retain(h) as kept:
        early = (3 * h).sum()
        h.mul_(5)
        (early + h.sum()).backward()
    right = torch.full_like(w, 8)
    return Seen(torch=[moved], gradkit=[check("of the value at the call", kept.grads, right)])
