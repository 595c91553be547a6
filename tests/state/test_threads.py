"""Calls of several threads that put tensors into one module: each gets its own gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta
from gradkit._state import module_state

THREADS, ROUNDS = 4, 12


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    assert not module_state._blocks


class Branch(nn.Module):
    """A module that shares a part with others, and keeps what it saw."""

    def __init__(self, shared: nn.Module, width: int) -> None:
        super().__init__()
        self.shared, self.head = shared, nn.Linear(4, width)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.tanh(self.shared(x))
        return self.head(self.seen)


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at once, each in a thread, and return what they return, or raise."""
    results: list[Any] = [None] * len(works)
    barrier = Barrier(len(works))

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a deadlock"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def modules(device: torch.device, kind: str) -> list[nn.Module]:
    """Return a module for each thread: one for all, or several that share a part."""
    shared = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    if kind == "one":
        return [Branch(shared, 2).to(device)] * THREADS
    return [Branch(shared, 1 + i).to(device) for i in range(THREADS)]


def functional(module: nn.Module, x: Tensor) -> list[Tensor]:
    call, params, buffers = func.make_functional(module)
    run = func.value_and_grads(lambda p: call(p, buffers, x)[0].square().mean())
    value, grads = run(params)
    return [value, *grads.values()]


def unrolled(module: nn.Module, x: Tensor) -> list[Tensor]:
    call, params, buffers = func.make_functional(module)

    def loss(p: Any, _: Any, batch: Tensor) -> Tensor:
        return call(p, buffers, batch)[0].square().mean()

    adapted = meta.unroll(loss, params, [x] * 2, meta.sgd(lr=0.1))
    return list(gradkit.value_and_grads(adapted.values.sum(), params)[1].values())


def of_samples(module: nn.Module, x: Tensor) -> list[Tensor]:
    call, params, buffers = func.make_functional(module)

    def loss(p: Any, one: Tensor) -> Tensor:
        return call(p, buffers, one[None])[0].square().mean()

    return list(func.per_sample_grads(loss, in_dims=(None, 0))(params, x).values())


@pytest.mark.parametrize("kind", ["one", "shared"])
@pytest.mark.parametrize("run", [functional, unrolled, of_samples])
def test_each_thread_gets_its_own_gradients(
    device: torch.device, run: Callable[[nn.Module, Tensor], list[Tensor]], kind: str
) -> None:
    each = modules(device, kind)
    if run is of_samples:
        for module in each:
            module.eval()
    own = [[id(t) for t in m.state_dict(keep_vars=True).values()] for m in each]
    data = [torch.randn(6, 3, device=device) for _ in range(THREADS)]
    right = [run(*pair) for pair in zip(each, data, strict=True)]

    def work(index: int) -> Callable[[], list[list[Tensor]]]:
        return lambda: [run(each[index], data[index]) for _ in range(ROUNDS)]

    for index, rounds in enumerate(in_threads(list(map(work, range(THREADS))))):
        for grads in rounds:
            torch.testing.assert_close(grads, right[index], rtol=1e-4, atol=1e-5)
    assert own == [[id(t) for t in m.state_dict(keep_vars=True).values()] for m in each]
    assert all(module.seen is None for module in each)


def test_calls_inside_calls_of_one_thread_do_not_wait(device: torch.device) -> None:
    """In its forward pass, in hooks, and in the backward pass of a recomputed inner loop."""
    inner = nn.Linear(3, 3).to(device)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            call, params, buffers = func.make_functional(self.inner)

            def loss(p: Any, _: Any, batch: Tensor) -> Tensor:
                return call(p, buffers, batch)[0].square().mean()

            new = meta.unroll(loss, params, [x] * 2, meta.sgd(lr=0.1), memory="recompute").params
            grads = gradkit.value_and_grads(call(new, buffers, x)[0].square().mean(), params)[1]
            return gradkit.tree.global_norm(grads) + self.inner(x).sum()

    outer, x = Outer(), torch.randn(4, 3, device=device)
    call, params, buffers = func.make_functional(outer)
    inner.register_forward_hook(lambda *_: func.make_functional(outer) and None)
    expected = outer(x)
    works = [lambda: call(params, buffers, x)[0] for _ in range(THREADS)]
    for out in in_threads(works):
        torch.testing.assert_close(out, expected)


def test_modules_that_call_each_other_raise_before_they_wait_for_ever(device: torch.device) -> None:
    both = Barrier(2)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.other: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            if self.other:
                both.wait(60)
                call, params, buffers = func.make_functional(self.other[0])
                x = call(params, buffers, x)[0]
            return x * self.weight

    a, b, one, two = (Calls().to(device) for _ in range(4))
    one.other, two.other = [b], [a]
    one.add_module("a", a)
    two.add_module("b", b)
    x = torch.ones((), device=device)

    def run(module: nn.Module) -> Tensor | str:
        call, params, buffers = func.make_functional(module)
        try:
            return call(params, buffers, x)[0]
        except gradkit.UnsupportedGraphError as error:
            return str(error)

    results = in_threads([lambda: run(one), lambda: run(two)])
    refused = [result for result in results if isinstance(result, str)]
    assert refused
    assert all("a call of another thread, which waits for this one" in text for text in refused)


def test_a_call_that_waits_too_long_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_state, "_LONGEST_WAIT", 0.05)
    entered, leave = Event(), Event()

    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            leave.wait(60)
            return super().forward(x)

    module = Waits(2, 1).to(device)
    x = torch.ones(2, device=device)
    call, params, buffers = func.make_functional(module)
    thread = Thread(target=lambda: call(params, buffers, x))
    thread.start()
    entered.wait(60)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"Waits in a call of another thread"):
        func.make_functional(module)
    leave.set()
    thread.join()
    assert torch.equal(call(params, buffers, x)[0], module(x))  # and what to do: one call at a time
