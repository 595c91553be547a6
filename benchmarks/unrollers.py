"""The ways to differentiate through an inner loop: each finds the meta-gradient, steps included."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

import gradkit
from benchmarks import loops, peers
from benchmarks.harness import Side
from benchmarks.loops import Course, Loop, inner_loss, query_loss

PLAIN, HIGHER, TORCHOPT = "create_graph loop", "higher", "TorchOpt"
STORE, RECOMPUTE, SEGMENTS = "store", "recompute", "memory=4"
_FEW = 4  # samples of a step suffice to see whether gradients agree


def gradkits(task: Loop, memory: Literal["store", "recompute"] | int) -> Side:
    """Return gradkit's way."""
    opt = gradkit.meta.sgd(lr=loops.RATE)
    params = task.params

    def loss_fn(params: dict[str, Tensor], weights: Tensor, batch: loops.Pair) -> Tensor:
        samples, targets = batch
        return inner_loss(task.apply(params, samples), targets, weights)

    def run(course: Course) -> list[Tensor]:
        adapted = gradkit.meta.unroll(
            loss_fn, params, course.batches, opt, outer=course.weights, memory=memory
        )
        samples, targets = course.query
        loss = query_loss(task.apply(adapted.params, samples), targets)
        _, (by_weights, by_params) = gradkit.value_and_grads(loss, (course.weights, params))
        return [by_weights, *by_params.values()]

    return Side(task.build, run)


def plain(task: Loop) -> Side:
    """Return the loop that one writes by hand."""
    params = task.params

    def run(course: Course) -> list[Tensor]:
        now = params
        for samples, targets in course.batches:
            loss = inner_loss(task.apply(now, samples), targets, course.weights)
            grads = torch.autograd.grad(loss, list(now.values()), create_graph=True)
            now = {
                name: param - loops.RATE * grad
                for (name, param), grad in zip(now.items(), grads, strict=True)
            }
        samples, targets = course.query
        loss = query_loss(task.apply(now, samples), targets)
        return list(torch.autograd.grad(loss, [course.weights, *params.values()]))

    return Side(task.build, run)


def _higher(task: Loop) -> Side:
    library = import_module("higher")
    params = list(task.params.values())

    def run(course: Course) -> list[Tensor]:
        sgd = torch.optim.SGD(params, lr=loops.RATE)
        context = library.innerloop_ctx(task.module, sgd, copy_initial_weights=False)
        with context as (module, optimizer):
            for samples, targets in course.batches:
                optimizer.step(inner_loss(module(samples), targets, course.weights))
            loss = query_loss(module(course.query[0]), course.query[1])
            return list(torch.autograd.grad(loss, [course.weights, *params]))

    return Side(task.build, run)


def _torchopt(task: Loop) -> Side:
    library = import_module("torchopt")
    module, params = task.module, list(task.params.values())

    def run(course: Course) -> list[Tensor]:
        before = library.extract_state_dict(module, by="reference")
        optimizer = library.MetaSGD(module, lr=loops.RATE)
        for samples, targets in course.batches:
            optimizer.step(inner_loss(module(samples), targets, course.weights))
        loss = query_loss(module(course.query[0]), course.query[1])
        grads = torch.autograd.grad(loss, [course.weights, *params])
        library.recover_state_dict(module, before)
        return list(grads)

    return Side(task.build, run)


WAYS: dict[str, Callable[[Loop], Side]] = {
    PLAIN: plain,
    STORE: partial(gradkits, memory="store"),
    RECOMPUTE: partial(gradkits, memory="recompute"),
    SEGMENTS: partial(gradkits, memory=4),
    HIGHER: _higher,
    TORCHOPT: _torchopt,
}


def side(name: str, task: Loop) -> tuple[Side | None, str]:
    """Return a way, on a copy of the module, if it gives the same gradients as the plain loop.

    Args:
        name: Which of `WAYS`.
        task: The loop.

    Returns:
        Its side, and nothing; or None, and why.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some libraries are older than what they import
        return peers.found(lambda: WAYS[name](task.copy()), lambda: _agree(name, task))


def _agree(name: str, task: Loop) -> bool:
    results: list[Any] = []
    for make in (WAYS[name], plain):
        one = make(task.copy(torch.float64, _FEW))
        torch.manual_seed(0)
        results.append(one.run(one.build()))
    return peers.close(*results)
