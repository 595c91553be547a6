"""Users' programs with retain_grad(), retain_graph and create_graph, and the same with gradkit.

The programs are plain torch, as people write them; they run to show what torch does here.
"""

# loss.backward() has no types in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings

import torch
from torch import Tensor, autograd

import gradkit
from gradkit._doctor.checks import FREED, Observation, check, error_of, leaf


def branches(device: torch.device) -> Observation:
    """Differentiate with respect to a tensor with two uses."""
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
    with gradkit.safe_retain(h) as retained:
        gradkit.value_and_grads(h.sum() + (h * h).sum(), w)
    h = w * 2
    branches = gradkit.per_loss_grads([h.sum(), (h * h).sum()], h)
    return Observation(
        torch=[without, same, summed],
        gradkit=[
            check("safe_retain, over both", retained.grads, 1 + 2 * h),
            check("each branch", branches, [torch.ones_like(h), 2 * h]),
        ],
    )


def position(device: torch.device) -> Observation:
    """Retain a gradient before the use of a tensor, after it, and after the pass."""
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
    error = error_of(lambda: _change_below_a_view(w * 2), "changed in place")
    return Observation(
        torch=[late, too_late],
        gradkit=[
            check("before the use", before.grads, 2 * h),
            check("after the use", after.grads, 2 * h),
            check("where it would be lost", error, "UnsupportedGraphError: changed in place"),
        ],
    )


def _change_below_a_view(h: Tensor) -> None:
    with gradkit.safe_retain(h[:1]):
        h.add_(1)
        (h * h).sum().backward()


def not_a_leaf(device: torch.device) -> Observation:
    """Read the gradient of a tensor without retain_grad()."""
    w = leaf(device, 1, 2)
    y = w * 2
    y.sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nothing = check("y.grad", y.grad, None)
    warned = any("is not a leaf Tensor is being accessed" in str(w.message) for w in caught)
    y = w * 2
    with gradkit.safe_retain({"y": y}) as retained:
        y.sum().backward()
    return Observation(
        torch=[nothing, check("with a warning", warned, True)],
        gradkit=[check("safe_retain", retained.grads, {"y": torch.ones_like(y)})],
    )


def twice(device: torch.device) -> Observation:
    """Run a second pass after retain_grad()."""
    w = leaf(device, 1, 2)
    h = w * 2
    h.retain_grad()
    loss = (h * h).sum()
    loss.backward()
    error = error_of(loss.backward, FREED)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    w.grad = None
    loss.backward()
    retained = check("with retain_graph=True, w.grad", w.grad, 2 * w)
    h = w * 2
    grads = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    return Observation(
        torch=[check("backward() twice", error, f"RuntimeError: {FREED}"), retained],
        gradkit=[check("two passes in one call", grads, [torch.full_like(w, 2), 8 * w])],
    )


def create_graph(device: torch.device) -> Observation:
    """Differentiate several losses without create_graph."""
    w = leaf(device, 1, 2)
    h = w * 2
    first, second = h.sum(), (h * h).sum()
    by_torch = [*autograd.grad(first, w, retain_graph=True), *autograd.grad(second, w)]
    h = w * 2
    by_gradkit = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    _, slope = gradkit.value_and_grads((w**3).sum(), w, create_graph=True)
    assert slope is not None
    _, second_order = gradkit.value_and_grads(slope.sum(), w)
    expected = [torch.full_like(w, 2), 8 * w]
    return Observation(
        torch=[
            check("without it, both", by_torch, expected),
            check("they carry a graph", any(g.requires_grad for g in by_torch), False),
        ],
        gradkit=[
            check("without it, both", by_gradkit, expected),
            check("they carry a graph", any(g.requires_grad for g in by_gradkit), False),
            check("with it, a derivative of one", second_order, 6 * w),
        ],
    )


def in_place(device: torch.device) -> Observation:
    """Retain the gradient of a tensor that is then changed in place."""
    w = leaf(device, 1, 2)
    h = w * 2
    h.retain_grad()
    early = (3 * h).sum()
    h.mul_(5)
    (early + h.sum()).backward()
    moved = check("h.grad, of the new value only", h.grad, torch.ones_like(w))
    h = w * 2
    with gradkit.safe_retain(h) as retained:
        early = (3 * h).sum()
        h.mul_(5)
        (early + h.sum()).backward()
    at_call = check("of the value at the call", retained.grads, torch.full_like(w, 8))
    return Observation(torch=[moved], gradkit=[at_call])
