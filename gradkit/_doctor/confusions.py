"""The twelve confusions of docs/confusions.md: users' programs, and the same with gradkit.

The programs are plain torch, as people write them; they run to show what torch does here. Each
checks that against what torch did when the page was written, and what gradkit returns against the
right value, which is written out or computed by a formula.
"""

# loss.backward() has no types in torch.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, autograd

import gradkit
from gradkit._doctor.checks import Finding, error_of, leaf

# A program gets a leaf tensor w = [1, 2].
Program: TypeAlias = Callable[[Tensor, Finding], None]

_FREED = "Trying to backward through the graph a second time"
_FREED_ERROR = f"RuntimeError: {_FREED}"
_UNUSED = "appears to not have been used in the graph"


class Confusion(NamedTuple):
    """The title of a section of docs/confusions.md, and the program that shows it."""

    title: str
    program: Program


CONFUSIONS: list[Confusion] = []  # in the order of the page


def _confusion(title: str) -> Callable[[Program], None]:
    return lambda program: CONFUSIONS.append(Confusion(title, program))


@_confusion('"The second backward changes w.grad, even if the loss does not use w"')
def _other_losses(w: Tensor, seen: Finding) -> None:
    v = leaf(w.device, 3, 4)
    (w * w).sum().backward()
    (v * v).sum().backward()
    seen.in_torch("w.grad after a loss of w, and one of v", w.grad, 2 * w)
    (w * w).sum().backward()
    seen.in_torch("after a second loss of w", w.grad, 4 * w)
    losses = {"of w": (w * w).sum(), "of v": (v * v).sum()}
    grads = gradkit.per_loss_grads(losses, {"w": w})
    seen.in_gradkit("the loss of w, with respect to w", grads["of w"]["w"], 2 * w)
    seen.in_gradkit("the loss of v, with respect to w", grads["of v"]["w"], None)


@_confusion('"autograd.grad of a loss that does not use w gives a zero gradient"')
def _unused(w: Tensor, seen: Finding) -> None:
    v = leaf(w.device, 3, 4)
    loss = (v * v).sum()
    error = error_of(lambda: autograd.grad(loss, [v, w]), _UNUSED)
    seen.in_torch("autograd.grad", error, f"RuntimeError: {_UNUSED}")
    seen.in_torch("and then backward()", error_of(loss.backward, _FREED), _FREED_ERROR)
    loss, params = (v * v).sum(), {"v": v, "w": w}
    error = error_of(lambda: gradkit.value_and_grads(loss, params, unused="error"), "params['w']")
    seen.in_gradkit('unused="error"', error, "UnreachedParamError: params['w']")
    _, none = gradkit.value_and_grads(loss, params, retain_graph=True)
    seen.in_gradkit("after that the graph still runs: with respect to w", none["w"], None)
    _, zeros = gradkit.value_and_grads(loss, params, unused="zeros")
    seen.in_gradkit('unused="zeros", with respect to w', zeros["w"], torch.zeros_like(w))


@_confusion('"After backward(), autograd.grad can be called on the same graph"')
def _freed(w: Tensor, seen: Finding) -> None:
    square, cube = (w * w).sum(), (w * w * w).sum()
    square.backward()
    cube.backward()
    error = error_of(lambda: autograd.grad(square, w), _FREED)
    seen.in_torch("autograd.grad after backward()", error, _FREED_ERROR)
    losses = {"1": (w * w).sum(), "2": (w * w * w).sum()}
    grads = gradkit.per_loss_grads(losses, w)
    seen.in_gradkit("both from one call", grads, {"1": 2 * w, "2": 3 * w * w})
    text = "ask for all gradients in one call"
    error = error_of(lambda: gradkit.value_and_grads(losses["1"], w), text)
    seen.in_gradkit("a second call", error, f"FreedGraphError: {text}")


@_confusion('"backward() and autograd.grad use different graphs, or different numerics"')
def _same_engine(w: Tensor, seen: Finding) -> None:
    w = torch.linspace(-2, 2, 101, dtype=torch.float32, device=w.device).requires_grad_()

    def losses() -> list[Tensor]:
        h = w.tanh()
        return [(h * 0.3).exp().sum(), (h * h).logsumexp(0)]

    autograd.backward(losses())
    joint: Any = w.grad
    (by_grad,) = autograd.grad(losses(), w)
    seen.in_torch("autograd.grad has the bits of backward()", torch.equal(by_grad, joint), True)
    w.grad = None
    for loss in losses():
        loss.backward(retain_graph=True)
    in_turn: Any = w.grad
    close = torch.allclose(joint, in_turn, rtol=1e-5, atol=1e-6)
    seen.in_torch("two passes added up: equal up to rounding", close, True)
    _, result = gradkit.value_and_grads(losses(), w)
    seen.in_gradkit("value_and_grads has them", torch.equal(result, joint), True)
    result = gradkit.tree.add(*gradkit.per_loss_grads(losses(), w))
    seen.in_gradkit("per_loss_grads has those of two", torch.equal(result, in_turn), True)


@_confusion('"autograd.grad does not accumulate correctly for a shared parameter"')
def _shared(w: Tensor, seen: Finding) -> None:
    first, second = (w * w).sum(), (3 * w).sum()
    each = [autograd.grad(loss, w, retain_graph=True)[0] for loss in (first, second)]
    seen.in_torch("autograd.grad of each", each, [2 * w, torch.full_like(w, 3)])
    first.backward()
    second.backward()
    seen.in_torch("w.grad after both", w.grad, 2 * w + 3)
    grads = gradkit.per_loss_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    seen.in_gradkit("tree.add of both", gradkit.tree.add(*grads)["w"], 2 * w + 3)
    _, joint = gradkit.value_and_grads([(w * w).sum(), (3 * w).sum()], {"w": w})
    seen.in_gradkit("the joint call", joint["w"], 2 * w + 3)


@_confusion("Forgetting zero_grad()")
def _zero_grad(w: Tensor, seen: Finding) -> None:
    (w * w).sum().backward()
    (w * w).sum().backward()
    seen.in_torch("w.grad after two equal steps", w.grad, 4 * w)
    w.grad = None
    for _ in range(2):
        _, grad = gradkit.value_and_grads((w * w).sum(), w)
    seen.in_gradkit("the gradient of the second step", grad, 2 * w)
    seen.in_gradkit("w.grad", w.grad, None)


@_confusion('"retain_grad() keeps a branch from overwriting the gradient of another"')
def _branches(w: Tensor, seen: Finding) -> None:
    h = w * 2
    (h.sum() + (h * h).sum()).backward()
    seen.in_torch("w.grad without retain_grad()", w.grad, 2 + 8 * w)
    w.grad = None
    h = w * 2
    h.retain_grad()
    (h.sum() + (h * h).sum()).backward()
    seen.in_torch("w.grad with it", w.grad, 2 + 8 * w)
    seen.in_torch("h.grad, over both branches", h.grad, 1 + 2 * h)
    h = w * 2
    with gradkit.safe_retain(h) as retained:
        gradkit.value_and_grads(h.sum() + (h * h).sum(), w)
    seen.in_gradkit("safe_retain, over both", retained.grads, 1 + 2 * h)
    h = w * 2
    branches = gradkit.per_loss_grads([h.sum(), (h * h).sum()], h)
    seen.in_gradkit("each branch", branches, [torch.ones_like(h), 2 * h])


@_confusion('"retain_grad() must stand before the tensor is used"')
def _position(w: Tensor, seen: Finding) -> None:
    h = w * 2
    loss = (h * h).sum()
    h.retain_grad()
    loss.backward()
    seen.in_torch("after the use, h.grad", h.grad, 2 * h)
    h = w * 2
    (h * h).sum().backward()
    h.retain_grad()
    seen.in_torch("after the pass, h.grad", h.grad, None)
    h = w * 2
    with gradkit.safe_retain(h) as retained:
        gradkit.value_and_grads((h * h).sum(), w)
    seen.in_gradkit("before the use", retained.grads, 2 * h)
    h = w * 2
    loss = (h * h).sum()
    with gradkit.safe_retain(h) as retained:
        gradkit.value_and_grads(loss, w)
    seen.in_gradkit("after the use", retained.grads, 2 * h)
    text = "changed in place"
    error = error_of(lambda: _change_below_a_view(w * 2), text)
    seen.in_gradkit("where it would be lost", error, f"UnsupportedGraphError: {text}")


def _change_below_a_view(h: Tensor) -> None:
    with gradkit.safe_retain(h[:1]):
        h.add_(1)
        (h * h).sum().backward()


@_confusion('"Without retain_grad(), y.grad raises"')
def _not_a_leaf(w: Tensor, seen: Finding) -> None:
    y = w * 2
    y.sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen.in_torch("y.grad", y.grad, None)
    warned = any("is not a leaf Tensor is being accessed" in str(w.message) for w in caught)
    seen.in_torch("with a warning", warned, True)
    y = w * 2
    with gradkit.safe_retain({"y": y}) as retained:
        y.sum().backward()
    seen.in_gradkit("safe_retain", retained.grads, {"y": torch.ones_like(y)})


@_confusion('"retain_grad() lets you call backward() twice"')
def _twice(w: Tensor, seen: Finding) -> None:
    h = w * 2
    h.retain_grad()
    loss = (h * h).sum()
    loss.backward()
    seen.in_torch("backward() twice", error_of(loss.backward, _FREED), _FREED_ERROR)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    w.grad = None
    loss.backward()
    seen.in_torch("with retain_graph=True, w.grad", w.grad, 2 * w)
    h = w * 2
    grads = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    seen.in_gradkit("two passes in one call", grads, [torch.full_like(w, 2), 8 * w])


@_confusion('"Gradients of several losses need create_graph=True"')
def _create_graph(w: Tensor, seen: Finding) -> None:
    h = w * 2
    first, second = h.sum(), (h * h).sum()
    grads = [*autograd.grad(first, w, retain_graph=True), *autograd.grad(second, w)]
    expected = [torch.full_like(w, 2), 8 * w]
    seen.in_torch("without it, both", grads, expected)
    seen.in_torch("they carry a graph", any(g.requires_grad for g in grads), False)
    h = w * 2
    grads = gradkit.per_loss_grads([h.sum(), (h * h).sum()], w)
    seen.in_gradkit("without it, both", grads, expected)
    seen.in_gradkit("they carry a graph", any(g.requires_grad for g in grads), False)
    _, slope = gradkit.value_and_grads((w**3).sum(), w, create_graph=True)
    assert slope is not None
    _, second_order = gradkit.value_and_grads(slope.sum(), w)
    seen.in_gradkit("with it, a derivative of one", second_order, 6 * w)


@_confusion("A change in place after retain_grad()")
def _in_place(w: Tensor, seen: Finding) -> None:
    h = w * 2
    h.retain_grad()
    early = (3 * h).sum()
    h.mul_(5)
    (early + h.sum()).backward()
    seen.in_torch("h.grad, of the new value only", h.grad, torch.ones_like(w))
    h = w * 2
    with gradkit.safe_retain(h) as retained:
        early = (3 * h).sum()
        h.mul_(5)
        (early + h.sum()).backward()
    seen.in_gradkit("of the value at the call", retained.grads, torch.full_like(w, 8))
