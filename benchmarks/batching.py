"""A vector of losses, one a sample: one vmapped pass, a pass an element, and what is picked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

import gradkit
from benchmarks import models
from benchmarks.harness import Side, Timing, measure
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, timed
from gradkit._core.call import Strategy

LOOP = "autograd.grad in a loop"
_STRATEGIES: tuple[Strategy, ...] = ("batched", "auto")
# Width, depth, number of losses.
_SIZES = ((16, 2, 8), (32, 3, 128), (64, 3, 32), (256, 3, 8), (256, 3, 64), (512, 4, 16))


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each size the row of the batched pass and that of the automatic choice."""
    for width, depth, count in ((8, 1, 4),) if plan.quick else _SIZES:
        task = models.samples(width, depth, count, plan.device)
        yield from _both(plan, _sides(task), f"MLP W{width} D{depth}, vector of {count}", task)


def _both(plan: Plan, sides: Mapping[str, Side], size: str, task: Task) -> Iterator[Row]:
    what, better = f"per_loss_grads batched, {size}", "loop"
    problem = _fallback(task)
    if problem:
        yield Row(what=what, against=LOOP, note=problem)
    else:
        timings = _pair(plan, sides, "batched", "loop")
        limit = 0.5 if plan.device.type == "cuda" else None
        yield timed(what, LOOP, timings, ours="batched", theirs="loop", limit=limit)
        better = min(timings, key=lambda name: timings[name].typical)
    yield timed(
        f"per_loss_grads auto, {size}",
        f"the better of batched and loop: {better}",
        _pair(plan, sides, "auto", better),
        ours="auto",
        theirs=better,
        limit=1.05,
    )


def _pair(plan: Plan, sides: Mapping[str, Side], *names: str) -> dict[str, Timing]:
    return measure({name: sides[name] for name in names}, plan.device, plan.effort)


def _sides(task: Task) -> dict[str, Side]:
    params = list(task.params.values())
    ours = {name: Side(task.build, _by(task, name)) for name in _STRATEGIES}
    return ours | {"loop": Side(task.build, lambda losses: _loop(params, losses))}


def _by(task: Task, strategy: Strategy) -> Callable[[Tensor], object]:
    return lambda losses: gradkit.per_loss_grads(losses, task.params, strategy=strategy)


def _fallback(task: Task) -> str:
    """Return why the batched pass is none here, or nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradkit.GradkitWarning)
        try:
            _by(task, "batched")(task.build())
        except gradkit.GradkitWarning as warning:
            return str(warning)
    return ""


def _loop(params: list[Tensor], losses: Tensor) -> list[Tensor]:
    """Return the Jacobian, row by row: the fastest of the ways in which one could write it."""
    found = [losses.new_empty(len(losses), *param.shape) for param in params]
    cotangents = torch.eye(len(losses), device=losses.device)
    for index, cotangent in enumerate(cotangents):
        keep = index + 1 < len(losses)
        grads = torch.autograd.grad(losses, params, cotangent, retain_graph=keep)
        for rows, grad in zip(found, grads, strict=True):
            rows[index] = grad
    return found
