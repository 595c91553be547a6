"""Gradients inside of functions that a hook or a Function has written on: right, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta
from tests.helpers import Sevenfold

Tensors = dict[str, Tensor]
Apply = Callable[[Tensor], Tensor]


def hooked(x: Tensor) -> Tensor:
    result = x * 1
    result.register_hook(lambda grad: grad.mul_(7))
    return result


WRITERS: dict[str, Apply] = {
    "Function": Sevenfold.apply,
    "Function above a node": lambda x: Sevenfold.apply(x * 1),
    "hook": hooked,
}


def losses(write: Apply) -> dict[str, Callable[[Tensors], Tensor]]:
    return {
        "a sibling": lambda p: (3 * (write(p["w"]) + p["v"])).sum(),
        "a sibling before": lambda p: (3 * (p["v"] + write(p["w"]))).sum(),
        "nobody": lambda p: (3 * (write(p["w"]) * p["v"])).sum(),
    }


def value_and_grads(fn: Callable[[Tensors], Tensor], p: Tensors) -> Tensors:
    result: Tensors = func.value_and_grads(fn)(p)[1]
    return result


def rows(fn: Callable[[Tensors], Tensor], p: Tensors, **options: Any) -> Tensors:
    losses = func.per_loss_grads(lambda p: fn(p) * torch.ones(2, device=p["w"].device), **options)
    return {name: grad[1] for name, grad in losses(p).items()}


def samples(fn: Callable[[Tensors], Tensor], p: Tensors) -> Tensors:
    ones = torch.ones(2, device=p["w"].device)
    by_sample = func.per_sample_grads(lambda p, x: fn(p) * x)(p, ones)
    return {name: grad[1] for name, grad in by_sample.items()}


def inner_step(fn: Callable[[Tensors], Tensor], p: Tensors, **options: Any) -> Tensors:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in p.items()}
    after = meta.unroll(lambda p, o, b: fn(p), leaves, [0], meta.sgd(1.0), **options).params
    return {name: tensor.detach() - after[name].detach() for name, tensor in leaves.items()}


def inner_step_of_func(fn: Callable[[Tensors], Tensor], p: Tensors) -> Tensors:
    def step(p: Tensors) -> tuple[Tensor, Tensors]:
        after = meta.unroll(lambda p, o, b: fn(p), p, [0], meta.sgd(1.0)).params
        return after["v"].sum(), after

    _, (_, after) = torch.func.grad_and_value(step, has_aux=True)(p)
    return {name: tensor - after[name] for name, tensor in p.items()}


CALLS: dict[str, Callable[[Callable[[Tensors], Tensor], Tensors], Tensors]] = {
    "func.value_and_grads": value_and_grads,
    "func.per_loss_grads": rows,
    "func.per_loss_grads, batched": lambda fn, p: rows(fn, p, chunk_size=2),
    "func.per_sample_grads": samples,
    "unroll": inner_step,
    "unroll, recompute": lambda fn, p: inner_step(fn, p, memory="recompute"),
    "unroll, first order": lambda fn, p: inner_step(fn, p, first_order=True),
    "unroll in torch.func": inner_step_of_func,
}


def refusal_of(run: Callable[[], None]) -> str | None:
    try:
        run()
    except gradkit.UnsupportedGraphError as error:
        return str(error)
    return None


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", losses(hooked))
def test_it_is_that_of_backward_or_refused(
    device: torch.device,
    case: str,
    writer: str,
    call: Callable[[Callable[[Tensors], Tensor], Tensors], Tensors],
    checked: bool,
) -> None:
    loss = losses(WRITERS[writer])[case]
    p = {"w": torch.full((2,), 2.0, device=device), "v": torch.full((2,), 5.0, device=device)}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in p.items()}
    loss(leaves).backward()
    grads: Tensors = {}
    with gradkit.checked() if checked else nullcontext():
        refused = refusal_of(lambda: grads.update(call(loss, p)))
    if refused is not None:
        assert case != "nobody"
        assert re.search(r"\['v'\]: expected a gradient of the .* has written in place", refused)
        return
    for name, leaf in leaves.items():
        torch.testing.assert_close(grads[name], leaf.grad)


def test_a_variable_with_a_hook_of_its_own(device: torch.device) -> None:
    """Whatever the hook does to its own gradient belongs to it."""

    def loss(p: Tensors) -> Tensor:
        p["w"].register_hook(lambda grad: grad.mul_(7))
        return (3 * (p["w"] * p["w"].detach() + p["v"])).sum()

    p = {"w": torch.ones(2, device=device), "v": torch.ones(2, device=device)}
    for call in (value_and_grads, rows, inner_step):
        grads = call(loss, p)
        assert (grads["w"].tolist(), grads["v"].tolist()) == ([21, 21], [3, 3])


def test_an_intermediate_value_that_a_sibling_has_written_on(device: torch.device) -> None:
    """The engine's capture is copied as it arrives: what was written before is seen there."""
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    older = a * 1
    loss = (3 * (older + hooked(b))).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\[0\].*has written in place"):
        gradkit.value_and_grads(loss, [older, b])
    younger_first = hooked(b)
    younger = a * 1
    _, (of_younger, of_b) = gradkit.value_and_grads(
        (3 * (younger + younger_first)).sum(), [younger, b]
    )
    assert (of_younger.tolist(), of_b.tolist()) == ([3, 3], [21, 21])


def pulled(fn: Apply, cotangent: Tensor) -> Tensor:
    _, pull = func.vjp(fn, torch.zeros_like(cotangent))
    result: Tensor = pull(cotangent)[0]
    return result


def test_a_cotangent_that_was_changed_before(device: torch.device) -> None:
    """It may be a gradient itself: what was written on it before the pass is nobody's in it."""
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)  # now gradkit looks at versions
    cotangent = torch.ones(2, device=device).mul_(2).add_(1)
    assert pulled(lambda x: x + 0, cotangent).tolist() == [3, 3]
    assert pulled(lambda x: (x + 0).view(2, 1), cotangent.view(2, 1)).tolist() == [[3], [3]]
    with pytest.raises(gradkit.UnsupportedGraphError, match="has written in place"):
        func.vjp(lambda x, y: hooked(x) + y, *torch.zeros(2, 2, device=device))[1](cotangent)


@pytest.mark.parametrize("memory", ["recompute", 3])
def test_steps_that_do_not_reach_all_params(device: torch.device, memory: Any) -> None:
    """A cotangent that the outer pass has summed up in place goes through such a step as it is."""
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    outer = torch.full((2,), 2.0, device=device, requires_grad=True)
    leaves = {name: outer.detach().requires_grad_() for name in "wv"}

    def inner(p: Tensors, outer: Tensor, step: int) -> Tensor:
        fit = (outer * p["w"].square()).sum()
        return fit + p["v"].square().sum() if step % 2 == 0 else fit

    def grads(memory: Any) -> Any:
        decay = meta.sgd(0.1, weight_decay=0.1)
        after = meta.unroll(inner, leaves, range(5), decay, outer=outer, memory=memory).params
        loss = after["w"].square().sum() + after["v"].square().sum()
        return gradkit.value_and_grads(loss, {**leaves, "outer": outer})[1]

    assert gradkit.tree.allclose(grads(memory), grads("store"))
