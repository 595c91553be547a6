"""Calls of several threads that put tensors into one module: each gets its own gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from threading import Barrier, Thread
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
    assert not module_state._turns


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


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_modules_that_call_each_other_take_turns(device: torch.device, rounds: int) -> None:
    """Eight threads, half of which call a module inside of another, half the other way round."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((), 2.0))
            self.other: list[nn.Module] = []
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x * self.weight
            for module in self.other:
                call, params, buffers = func.make_functional(module)
                x = call(params, buffers, x)[0]
            return x * self.weight + self.seen

    a, b, one, two = (Calls().to(device) for _ in range(4))
    one.other, two.other = [b], [a]
    one.add_module("a", a)
    two.add_module("b", b)
    call_of = {module: func.make_functional(module)[0] for module in (one, two)}

    def work(index: int) -> Callable[[], list[float]]:
        module, value = (one, two)[index % 2], torch.tensor(1.0 + index, device=device)
        name = "ab"[index % 2] + ".weight"
        params = {"weight": value, name: torch.zeros_like(value)}

        def loss(p: Any, x: Tensor) -> Tensor:
            return call_of[module](p, {}, x)[0] + module.seen

        def run() -> list[float]:
            run_loss = func.value_and_grads(loss, create_graph=False)
            grads = [run_loss(params, value)[1] for _ in range(rounds // 8)]
            rows = func.per_sample_grads(loss, create_graph=False)(params, value[None])
            return [float(grad["weight"]) for grad in (*grads, rows)]

        return run

    for index, grads in enumerate(in_threads(list(map(work, range(8))))):
        # x = (2 + 2) v, then x w + v w, and v w again: its derivative by w is 6 v.
        assert grads == [6 * (1.0 + index)] * len(grads)
    assert all(module.seen is None for module in (a, b, one, two))


def test_a_pass_takes_the_turn_of_the_thread_that_waits_for_it(device: torch.device) -> None:
    """The threads of the engine, on a device, run a checkpoint again: their caller has the turn."""
    layer = nn.Linear(2, 2).to(device)
    call, params, buffers = func.make_functional(layer)
    block = func.checkpoint(lambda p, x: call(p, buffers, x)[0].tanh())

    def loss(p: Any, _: Any, x: Tensor) -> Tensor:
        own = torch.autograd.grad(block(params, x).sum(), params["weight"])[0]  # has it, meanwhile
        return block(p, x).square().sum() + own.sum()

    def run(x: Tensor) -> Tensor:
        values = meta.unroll(loss, params, [x] * 2, meta.sgd(lr=0.1), memory="recompute").values
        return gradkit.value_and_grads(values.sum(), params)[1]["weight"]

    xs = [torch.randn(3, 2, device=device) for _ in range(THREADS)]
    works = [partial(run, x) for x in xs]
    torch.testing.assert_close(in_threads(works), [work() for work in works])
