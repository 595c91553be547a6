"""Recomputed steps are held against the first run on the device; the host reads once, at the end.

No pass returns a gradient of steps that came out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from gradkit import meta
from tests.helpers import assert_same_bits, others_slow, unchanged
from tests.host_reads import host_reads

pytestmark = pytest.mark.long

STEPS = 4
MANY = 2000  # numbers of which checksums are compared; fewer, on the CPU, are kept themselves
few_and_many = pytest.mark.parametrize("size", [5, MANY])
recomputing = pytest.mark.parametrize(
    "memory", others_slow(["recompute", 1, 2, 3, STEPS], ["recompute", 2])
)


class Loop:
    """An inner loop whose loss reads a number that may change."""

    def __init__(self, device: torch.device, memory: Any, size: int = 5) -> None:
        self.factor = 1.0
        self.memory = memory
        self.w = torch.linspace(-1, 1, size, device=device).requires_grad_()
        self.scale = torch.full((), 0.5, device=device, requires_grad=True)
        self.batches = [
            torch.full((size,), 0.1 * step, device=device, requires_grad=True)
            for step in range(STEPS)
        ]

    def loss(self, w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return self.factor * (scale * (w - x) ** 4).sum()

    def adapted(self, loss: Callable[..., Tensor] | None = None) -> meta.Adapted:
        opt = meta.sgd(lr=0.1, momentum=0.5)
        return meta.unroll(
            loss or self.loss, self.w, self.batches, opt, outer=self.scale, memory=self.memory
        )

    def height(self, loss: Callable[..., Tensor] | None = None) -> Tensor:
        return self.adapted(loss).params.square().sum()


refused = pytest.raises(gradkit.UnsupportedGraphError, match="runs again")


@recomputing
@pytest.mark.parametrize("opt", [meta.sgd(lr=0.1), meta.adam(lr=0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_pass_reads_once(
    device: torch.device, memory: Any, opt: meta.Optimizer, create_graph: bool
) -> None:
    loop = Loop(device, memory, MANY)
    with host_reads() as seen:
        adapted = [
            meta.unroll(loop.loss, w, loop.batches, opt, outer=loop.scale, memory=memory)
            for w in (loop.w, loop.w * 2)
        ]
        loss = sum((one.params**2).sum() for one in adapted)
    assert seen == []
    with host_reads() as seen:
        gradkit.value_and_grads(loss, [loop.w, loop.scale], create_graph=create_graph)
    assert len(seen) <= 1  # of CUDA's own threads, nothing is seen


@recomputing
def test_the_second_derivative_reads_once(device: torch.device, memory: Any) -> None:
    loop = Loop(device, memory, MANY)
    _, grad = gradkit.value_and_grads(loop.height(), loop.w, create_graph=True)
    with host_reads() as seen:
        gradkit.value_and_grads(grad.square().sum(), loop.w)
    assert len(seen) <= 1


@recomputing
@pytest.mark.parametrize("part", ["params", "outer", "first batch", "last batch"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_whatever_a_pass_is_for(
    device: torch.device, memory: Any, part: str, create_graph: bool
) -> None:
    """A pass for the last batch does not run the first steps again."""
    loop = Loop(device, memory)
    parts = {"params": loop.w, "outer": loop.scale}
    parts |= {"first batch": loop.batches[0], "last batch": loop.batches[-1]}
    loss = loop.height()
    loop.factor = 1.5
    with unchanged(*parts.values()), refused:
        torch.autograd.grad(loss, parts[part], create_graph=create_graph)


@recomputing
@few_and_many
def test_backward_raises(device: torch.device, memory: Any, size: int) -> None:
    loop = Loop(device, memory, size)
    loss = loop.height()
    loop.factor = 1.5
    with refused:
        loss.backward(retain_graph=True)
    with refused:
        gradkit.backward_(loss, loop.w)


@recomputing
@few_and_many
def test_each_pass_is_checked_by_itself(device: torch.device, memory: Any, size: int) -> None:
    """A graph that is kept: one pass may differ, and the next one not."""
    loop = Loop(device, memory, size)
    loss = loop.height()
    expected = torch.autograd.grad(loss, loop.w, retain_graph=True)
    for factor in (2.0, 1.0, 2.0, 1.0):
        loop.factor = factor
        if factor == 1.0:
            assert_same_bits(torch.autograd.grad(loss, loop.w, retain_graph=True), expected)
        else:
            with refused:
                torch.autograd.grad(loss, loop.w, retain_graph=True)


@recomputing
def test_a_later_derivative_of_what_a_recomputation_made(device: torch.device, memory: Any) -> None:
    """Of n steps, the gradient's graph has each by itself: it runs again in another pass."""
    loop = Loop(device, memory)
    # Of a linear function, so that the segment of all steps is not in the gradient's graph.
    _, grad = gradkit.value_and_grads(loop.adapted().params.sum(), loop.w, create_graph=True)
    loop.factor = 1.5
    with refused:
        torch.autograd.grad(grad.sum(), loop.w, retain_graph=True)
    loop.factor = 1.0
    assert torch.autograd.grad(grad.sum(), loop.w)[0].isfinite().all()


@recomputing
@pytest.mark.parametrize("place_of_error", ["before", "between", "after"])
def test_a_pass_that_raises_in_between(
    device: torch.device, memory: Any, place_of_error: str
) -> None:
    """It leaves nothing that a later pass would read."""
    loop = Loop(device, memory, MANY)
    expected = torch.autograd.grad(loop.height(), loop.w)
    raising, calls = True, 0

    def loss_fn(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if place_of_error == "between" and raising and calls == STEPS + 2:
            raise ZeroDivisionError
        return loop.loss(*args)

    def stop(grad: Tensor) -> None:
        if raising and place_of_error != "between":
            raise ZeroDivisionError

    loss = loop.height(loss_fn)
    (loss if place_of_error == "before" else loop.w).register_hook(stop)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(loss, loop.w, retain_graph=True)
    raising = False
    with host_reads() as seen:
        grads = torch.autograd.grad(loss, loop.w, retain_graph=True)
    assert len(seen) <= 1
    assert_same_bits(grads, expected)
    loop.factor = 1.5
    with refused:
        torch.autograd.grad(loss, loop.w)


@pytest.mark.parametrize("name", ["last grad", "value", "first grad"])
@few_and_many
def test_one_number_of_many_that_differs(device: torch.device, name: str, size: int) -> None:
    """Also where a copy is compared first, rounding is none, and a loss that diverges is one."""
    change = torch.zeros((), device=device)
    loop = Loop(device, "recompute", size)

    def loss(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        total = loop.loss(w, scale, x)
        added = w[-1] * change if name == "last grad" else w.detach()[0] * change
        return total + (added if name != "first grad" else w[0] * change)

    def grad(by: float) -> Tensor:
        height = loop.height(loss)
        change.data.fill_(by)  # no version counts it
        try:
            return torch.autograd.grad(height, loop.w)[0]
        finally:
            change.data.zero_()

    assert_same_bits(grad(1e-9), grad(0.0))
    with refused:
        grad(0.1)
    loop.factor = float("nan")
    grad(0.1)


@pytest.mark.parametrize("memory", ["recompute", 1])
def test_a_difference_is_named_before_what_it_causes(device: torch.device, memory: Any) -> None:
    loop = Loop(device, memory)
    broken = False

    def loss_fn(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        if broken and not torch.equal(x, loop.batches[-1]):
            raise ZeroDivisionError
        return loop.loss(w, scale, x) * (2.0 if broken else 1.0)

    loss = loop.height(loss_fn)
    broken = True
    with refused:
        torch.autograd.grad(loss, loop.w)


@recomputing
@pytest.mark.parametrize("inside", ["loss_fn", "hook", "second loop"])
def test_passes_inside_a_pass(device: torch.device, memory: Any, inside: str) -> None:
    loop, other = Loop(device, memory), Loop(device, memory)
    returned: list[Tensor] = []

    def nested(grad: Any = None) -> None:
        with torch.enable_grad():  # a hook runs without
            _, inner = gradkit.value_and_grads(other.height(), other.w)
        returned.append(inner)

    def loss_fn(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        if inside == "second loop":
            adapted = meta.unroll(
                other.loss, w, [x, x], meta.sgd(lr=0.1), outer=scale, memory=memory
            )
            w = adapted.params
        elif inside == "loss_fn":
            nested()
        return loop.loss(w, scale, x)

    loss = loop.height(loss_fn)
    if inside == "hook":
        loss.register_hook(nested)
    torch.autograd.grad(loss, loop.w, retain_graph=True)
    if inside != "second loop":
        assert all(torch.equal(one, returned[0]) for one in returned)
        loop.factor = 1.5
    else:
        other.factor = 1.5
    with refused:
        torch.autograd.grad(loss, loop.w)


def test_a_wrong_loop_in_a_hook_of_a_right_one(device: torch.device) -> None:
    outer, inner = Loop(device, "recompute"), Loop(device, "recompute")
    loss, other = outer.height(), inner.height()
    inner.factor = 1.5
    seen: list[Exception] = []

    def hook(grad: Tensor) -> None:
        try:
            torch.autograd.grad(other, inner.w)
        except gradkit.UnsupportedGraphError as error:
            seen.append(error)

    loss.register_hook(hook)
    assert torch.autograd.grad(loss, outer.w)[0].isfinite().all()
    assert len(seen) == 1


def test_passes_of_several_threads(device: torch.device) -> None:
    """One goes on returning gradients, one goes on raising."""
    right, wrong = Loop(device, 2), Loop(device, 2)
    losses = [right.height(), wrong.height()]
    wrong.factor = 1.5
    outcomes: dict[int, list[str]] = {0: [], 1: []}

    def run(index: int, loop: Loop) -> None:
        for _ in range(10):
            try:
                torch.autograd.grad(losses[index], loop.w, retain_graph=True)
                outcomes[index].append("returned")
            except gradkit.UnsupportedGraphError:
                outcomes[index].append("raised")

    threads = [Thread(target=run, args=pair) for pair in enumerate((right, wrong))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {0: ["returned"] * 10, 1: ["raised"] * 10}


def test_a_node_that_is_called_by_hand(device: torch.device) -> None:
    """No pass ends then, so that it is read at once."""
    loop = Loop(device, "recompute")
    adapted = meta.unroll(
        loop.loss, loop.w, loop.batches[:1], meta.sgd(lr=0.1), outer=loop.scale, memory="recompute"
    )
    node = adapted.params.grad_fn
    assert node is not None
    run: Any = node.apply
    cotangents = [torch.ones_like(loop.w), None]
    run(*cotangents)
    loop.factor = 1.5
    with refused:
        run(*cotangents)


@pytest.mark.parametrize("memory", ["recompute", 2])
def test_control_flow_of_torch_is_refused(device: torch.device, memory: Any) -> None:
    """Its writes could not be undone."""
    loop = Loop(device, memory)

    def branch(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return torch.cond(w.sum() > 0, torch.mul, torch.sub, (w, scale)).sum()

    expected = r"torch\.cond.*\n.*torch\.where"
    with (
        unchanged(loop.w, loop.scale),
        pytest.raises(gradkit.UnsupportedGraphError, match=expected),
    ):
        loop.adapted(branch)
    torch._dynamo.reset()
    assert loop.height().isfinite()


@recomputing
def test_steps_whose_params_do_not_depend_on_those_before(
    device: torch.device, memory: Any
) -> None:
    """The first steps of schedule-free AdamW give params that none of the old ones is in."""
    start = torch.linspace(-1, 1, 5, device=device)
    batches = [0.1 * step * torch.ones_like(start) for step in range(STEPS)]

    def adapted(memory: Any) -> Tensor:
        return meta.unroll(
            lambda w, _, x: ((w - x) ** 4).sum(),
            start,
            batches,
            meta.schedule_free_adamw(lr=0.1),
            memory=memory,
        ).params

    assert_same_bits(adapted(memory).detach(), adapted("store"))
