"""A hand-written inner loop: what a step costs under the graph of all steps before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

import gradkit
from benchmarks.harness import Effort, Side, Timing, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed

RAW = "autograd.grad in the same loop"
_COUNTS, _FEW = (10, 40, 160), (2, 3)
_WIDTH, _BATCH, _RATE = 16, 16, 0.01
_LIMIT, _FLAT = 1.3, 1.1
Weights: TypeAlias = dict[str, Tensor]
Grads: TypeAlias = Callable[[Tensor, Weights], Weights]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each number of steps, and one for what a step costs late in a long loop."""
    timings: dict[int, dict[str, Timing]] = {}
    for steps in _FEW if plan.quick else _COUNTS:
        # A loop of many steps may take seconds, and its rounds are many steps each.
        effort = plan.effort if plan.quick else Effort(least=7, seconds=3, warmup=1)
        timings[steps] = measure(sides(steps, plan.device), plan.device, effort)
        what = f"value_and_grads(create_graph=True), inner loop of {steps} steps"
        yield timed(what, RAW, timings[steps], theirs="raw", limit=_LIMIT)
    yield _growth(timings)


def _growth(timings: dict[int, dict[str, Timing]]) -> Row:
    """Return the row of a step in the longest loop over one in the shortest."""
    few, many = min(timings), max(timings)
    ours, theirs = (
        (timings[many][side].typical / many) / (timings[few][side].typical / few)
        for side in ("gradkit", "raw")
    )
    return Row(
        what=f"a step of the loop of {many} over one of that of {few}",
        against=RAW,
        ours=ours,
        theirs=theirs,
        unit="x",
        ratio=ours / theirs,
        figure=ours / theirs,
        want=Want(_FLAT),
        details={"steps": list(timings)},
    )


def sides(steps: int, device: torch.device) -> dict[str, Side]:
    """Return the ways to run the loop: MAML's, of two layers, with respect to its fast weights."""
    shapes = {"w1": (_WIDTH, _WIDTH), "b1": (_WIDTH,), "w2": (_WIDTH, _WIDTH), "b2": (_WIDTH,)}
    start = {
        name: (0.1 * torch.randn(shape, device=device)).requires_grad_()
        for name, shape in shapes.items()
    }

    def ours(loss: Tensor, weights: Weights) -> Weights:
        grads: Any = gradkit.value_and_grads(loss, weights, create_graph=True)[1]
        return dict(grads)

    def raw(loss: Tensor, weights: Weights) -> Weights:
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        return dict(zip(weights, grads, strict=True))

    def side(grads_of: Grads) -> Side:
        batch = torch.randn(_BATCH, _WIDTH, device=device)
        return Side(lambda: batch, lambda x: _adapt(grads_of, start, x, steps))

    return {"gradkit": side(ours), "raw": side(raw)}


def _adapt(grads_of: Grads, weights: Weights, x: Tensor, steps: int) -> Weights:
    for _ in range(steps):
        hidden = functional.linear(x, weights["w1"], weights["b1"]).tanh()
        loss = functional.linear(hidden, weights["w2"], weights["b2"]).square().mean()
        grads = grads_of(loss, weights)
        weights = {name: weight - _RATE * grads[name] for name, weight in weights.items()}
    return weights
