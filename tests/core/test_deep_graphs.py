"""Deep graphs that Python has seen are freed without recursion, and live no longer."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import gradkit


def test_a_deep_graph_needs_no_recursion(device: torch.device) -> None:
    w = torch.ones((), device=device, requires_grad=True)
    y = w
    for _ in range(20_000):
        y = y * 1.0
    losses = [y, y * 2]
    assert gradkit.per_loss_grads(losses, w, unused="error") == [1, 2]


def test_a_deep_graph_of_several_calls_needs_no_recursion(device: torch.device) -> None:
    """Each of them sees a part of it."""
    y = torch.ones((), device=device, requires_grad=True) * 1
    for _ in range(8):
        h = y
        for _ in range(9_000):
            h = h * 1.0
        (grad,) = gradkit.value_and_grads(h, [y], retain_graph=True)[1]
        assert grad == 1
        y = h
    del h, y


class Watched(torch.autograd.Function):
    """The identity, whose node can be watched."""

    alive: ClassVar[list[weakref.ref[object]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.watched = type("Watchable", (), {})()
        Watched.alive.append(weakref.ref(ctx.watched))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_part_of_a_large_graph_outlives_the_others_alone(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    Watched.alive.clear()
    branches = [Watched.apply(w).sum() for _ in range(4_000)]
    total = torch.stack(branches).sum()
    gradkit.per_loss_grads([total, total * 2], [w])
    kept = branches[3_000]
    del branches, total
    gc.collect()
    assert sum(each() is not None for each in Watched.alive) == 1
    del kept
    gc.collect()
    assert not any(each() is not None for each in Watched.alive)


def test_a_large_graph_of_two_threads_is_freed(device: torch.device) -> None:
    w = torch.ones((), device=device, requires_grad=True)
    Watched.alive.clear()
    made = [Watched.apply(w)]

    def lengthen() -> None:
        for _ in range(3_000):
            made[0] = made[0] * 1.0

    lengthen()
    other = threading.Thread(target=lengthen)
    other.start()
    other.join()
    losses = [made[0].sin(), made[0].cos()]
    gradkit.per_loss_grads(losses, [w], retain_graph=True)
    made.clear()
    losses.clear()
    gc.collect()
    assert Watched.alive[0]() is None


# In a thread with a quarter of the usual stack, which a chain of 10,000 nodes overflows.
CHAIN = """
import threading, torch, gradkit
threading.stack_size(2 << 20)
def run():
    w, u = (torch.ones(1, requires_grad=True) for _ in range(2))
    z = w
    for _ in range(20_000):
        z = {step}
    loss = z.sum()
    {call}
    del loss
    {last}
    print("alive")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


ERROR = """try: gradkit.value_and_grads(loss, {'w': w, 'u': u}, unused='error')
    except gradkit.UnreachedParamError: pass"""
EXPLAIN = "gradkit.report.explain(loss, {'w': w, 'u': u})"
PER_LOSS = "gradkit.per_loss_grads([loss, (z * 2).sum()], w, retain_graph=True)"
AGAIN = "y = z + 1; del z; gradkit.per_loss_grads(y, w); del y"
RESIDUAL = "z + torch.tanh(z) * 0"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "call", "last"),
    [("z * 1.0", ERROR, "del z"), (RESIDUAL, EXPLAIN, "del z"), (RESIDUAL, PER_LOSS, AGAIN)],
)
def test_a_long_chain_is_walked_and_freed(
    device: torch.device, step: str, call: str, last: str
) -> None:
    """Nodes that Python has seen are freed by recursion, unless something lets them go in order."""
    code = CHAIN.format(step=step, call=call, last=last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-500:]


# A loop whose graph grows step by step, each of which Python looks at by itself.
LOOP = """
import threading, torch, gradkit
threading.stack_size(1 << 20)

def by_hand(steps):
    w = [torch.ones(2, requires_grad=True) * 1 for _ in range(2)]
    m = [torch.zeros(2) for _ in range(2)]
    for _ in range(steps):
        grads = gradkit.value_and_grads((w[0] * w[1]).sum(), w, create_graph=True)[1]
        m = [0.9 * old + grad for old, grad in zip(m, grads)] if {momentum} else grads
        w = [x - 1e-6 * y for x, y in zip(w, m)]
    return w, m

def unrolled(steps):
    w = torch.ones(2, requires_grad=True)
    opt = gradkit.meta.sgd(1e-6)
    adapted = gradkit.meta.unroll(lambda w, _, x: (w * w).sum(), w, [0] * steps, opt)
    return [adapted.params], []

def run():
    w, m = {loop}(8_000)
    while w:
        w.pop(0)
    while m:
        m.pop(0)
    print("alive")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loop", "momentum"),
    [pytest.param("by_hand", 0.0, marks=pytest.mark.slow), ("by_hand", 0.9), ("unrolled", 0)],
)
def test_the_graph_of_a_long_loop_is_freed(device: torch.device, loop: str, momentum: bool) -> None:
    code = LOOP.format(loop=loop, momentum=momentum)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-500:]


def are_freed(watched: Sequence[weakref.ref[Any]]) -> bool:
    """Wait until all are: the thread of a device lets go of its last node a little later."""
    for _ in range(1_000):
        gc.collect()
        if not any(each() is not None for each in watched):
            return True
        time.sleep(0.01)
    return False


def test_what_is_put_in_order_lives_no_longer(device: torch.device) -> None:
    """Nor is it kept by itself."""
    leaf = torch.ones(2, device=device, requires_grad=True)
    Watched.alive.clear()
    w = leaf * 1
    for _ in range(1_000):
        _, grads = gradkit.value_and_grads((w * w).sum(), [w], create_graph=True)
        w = Watched.apply(w - 1e-6 * grads[0])
        Watched.alive[:-1] = Watched.alive[:1]  # the first and the last
    assert Watched.alive[0]() is not None
    del w, grads, _
    assert are_freed(Watched.alive)


def test_a_call_costs_no_more_after_a_long_history(device: torch.device) -> None:
    """Functions below the variables, which the pass does not execute, are not looked at."""
    w = torch.ones(2, device=device, requires_grad=True) * 1
    costs: list[int] = []
    for _ in range(120):
        loss = (w * w).sum()
        with calls_counted() as calls:
            _, grads = gradkit.value_and_grads(loss, [w], create_graph=True)
        w = Watched.apply(w - 1e-6 * grads[0])
        costs += calls
    assert min(costs[-5:]) < 1.2 * min(costs[15:20])  # a collection of garbage may add to one


@contextmanager
def calls_counted() -> Iterator[list[int]]:
    """Yield a list that, after the block, has the number of Python functions that ran in it."""
    count, result = itertools.count(), list[int]()
    before = sys.getprofile()
    sys.setprofile(lambda _, event, __: next(count) if event == "call" else None)
    try:
        yield result
    finally:
        sys.setprofile(before)
        result.append(next(count))


def sines(x: Tensor, count: int) -> Tensor:
    """Return the end of a chain of nodes."""
    for _ in range(count):
        x = x.sin()
    return x


def test_a_value_does_not_keep_what_is_below_another(device: torch.device) -> None:
    kept = torch.ones(2, device=device, requires_grad=True) * 1
    saved: list[weakref.ref[Tensor]] = []
    for _ in range(40):
        factor = torch.ones(2, device=device)
        saved.append(weakref.ref(factor))
        fresh = sines(torch.ones(2, device=device, requires_grad=True) * factor, 20)
        loss = sines(kept * fresh, 100).sum()
        gradkit.value_and_grads(loss, [kept, fresh], create_graph=True)
        del factor, fresh, loss
    assert are_freed(saved)


def test_a_value_below_another_is_freed_with_it(device: torch.device) -> None:
    """By way of a node that is older than those that were put in order before."""
    factor = torch.ones(2, device=device)
    saved = weakref.ref(factor)
    low = torch.ones(2, device=device, requires_grad=True) * 1
    node = low * factor
    del factor
    for _ in range(11):
        fresh = torch.ones(2, device=device, requires_grad=True) * 1
        gradkit.value_and_grads(sines(fresh, 280).sum(), [fresh], create_graph=True)
    for _ in range(20):
        high = sines(node, 250)
        total = (low * high).sum() + node.sum()
        gradkit.value_and_grads(total, [low, high], create_graph=True)
    del low, node, high, total, fresh
    gc.collect()
    assert saved() is None
