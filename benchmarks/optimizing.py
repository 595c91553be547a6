"""One step of an optimizer as a pure function, against TorchOpt's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

import gradkit
from benchmarks import peers
from benchmarks.harness import Side, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

THEIRS = "TorchOpt's functional adam"
_RATE, _WIDTH = 1e-3, 16
_COUNTED = 1e-4  # TorchOpt counts steps in float32, which costs 1 - 0.999**t some digits
Params: TypeAlias = dict[str, Tensor]
Init: TypeAlias = Callable[[Params], Any]
# Params, gradients and the optimizer's state to the new params and state.
Step: TypeAlias = Callable[[Params, Params, Any], tuple[Params, Any]]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the row for values alone, and the one for a step that gradients flow through."""
    count = 4 if plan.quick else 48
    for graph in (False, True):
        what = f"meta.adam step, {count} tensors, {'with' if graph else 'without'} a graph"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchOpt is older than what it imports
            make = partial(sides, count, plan.device, graph=graph)
            both, problem = peers.found(make, agree)
            if both is None:
                yield Row(what=what, against=THEIRS, note=problem)
                continue
            timings = measure(both, plan.device, plan.effort)
        yield timed(what, THEIRS, timings, theirs="torchopt", limit=0.5)


def sides(count: int, device: torch.device, *, graph: bool) -> dict[str, Side]:
    """Return both ways to take a step.

    Args:
        count: How many tensors, matrices and vectors by turns.
        device: Where.
        graph: Whether the gradients require grad, as in an inner loop.

    Returns:
        The sides.

    Raises:
        ImportError: TorchOpt is not installed.
    """

    def side(init: Init, step: Step) -> Side:
        state = init(_tensors(count, device))  # nothing writes on it

        def build() -> tuple[Params, Params]:
            grads = _tensors(count, device)
            for grad in grads.values():
                grad.requires_grad_(graph)
            return _tensors(count, device), grads

        return Side(build, lambda given: step(given[0], given[1], state))

    return {"gradkit": side(*_ours()), "torchopt": side(*_torchopt())}


def _tensors(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Params:
    return {
        f"p{index}": torch.randn((_WIDTH,) * (2 - index % 2), device=device, dtype=dtype)
        for index in range(count)
    }


def _ours() -> tuple[Init, Step]:
    opt = gradkit.meta.adam(lr=_RATE)
    return opt.init, opt.step


def _torchopt() -> tuple[Init, Step]:
    library = import_module("torchopt")
    opt = library.adam(lr=_RATE)

    def step(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        updates, state = opt.update(grads, state, params=params, inplace=False)
        return library.apply_updates(params, updates, inplace=False), state

    return opt.init, step


def agree() -> bool:
    """Return whether both give the same values, and gradients of the gradients, in three steps."""
    first, *grads = (_tensors(4, torch.device("cpu"), torch.float64) for _ in range(4))
    every = [grad.requires_grad_() for tree in grads for grad in tree.values()]
    results: list[list[Tensor]] = []
    for init, step in (_ours(), _torchopt()):
        params, state = first, init(first)
        for tree in grads:
            params, state = step(params, tree, state)
        total = torch.stack([leaf.square().sum() for leaf in params.values()]).sum()
        results.append([*params.values(), *torch.autograd.grad(total, every)])
    ours, theirs = results
    return peers.close(ours, theirs, rtol=_COUNTED)
