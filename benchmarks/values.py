"""The gradient of a loss by a tree of params, against the raw engine call on their list."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import gradkit
from benchmarks import models
from benchmarks.harness import Effort, Side, measure
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed

RAW = "autograd.grad on the list"
# How many layers, and the target, a ratio: small calls are judged by what they cost at all.
_LAYERS = {1: None, 10: None, 100: 1.06}
_FIXED_US, _LEAF_US = 25.0, 0.7


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows for a cheap graph, for what a call costs at all, and for long steps."""
    for layers, limit in {4: None}.items() if plan.quick else _LAYERS.items():
        both = sides(models.deep(16, layers, 16, plan.device))
        timings = measure(both, plan.device, plan.effort)
        what = f"value_and_grads, {2 * layers} params, 16 wide"
        yield timed(what, RAW, timings, theirs="raw", limit=limit)
    noise = measure({"again": both["raw"], "raw": both["raw"]}, plan.device, plan.effort)
    yield timed(f"noise: {RAW}", "itself", noise, ours="again", theirs="raw", limit=None)
    yield from _fixed_cost(plan)
    yield from _long_steps(plan)


def sides(task: Task) -> dict[str, Side]:
    """Return gradkit's way and the raw one for a task with one loss."""
    params = list(task.params.values())

    def ours(loss: Tensor) -> object:
        return gradkit.value_and_grads(loss, task.params)

    def raw(loss: Tensor) -> object:
        return torch.autograd.grad(loss, params)

    return {"gradkit": Side(task.build, ours), "raw": Side(task.build, raw)}


def _fixed_cost(plan: Plan) -> Iterator[Row]:
    few, many = 1, 8 if plan.quick else 200
    extra: dict[int, float] = {}
    for leaves in (few, many):
        timings = measure(
            sides(models.product(leaves, plan.device)),
            plan.device,
            plan.effort if plan.quick else Effort(least=100, most=4000, seconds=1.5),
        )
        ours, theirs = (timings[name].typical / 1e3 for name in ("gradkit", "raw"))
        extra[leaves] = ours - theirs
        yield Row(
            what=f"value_and_grads, what {leaves} {'leaf' if leaves == 1 else 'leaves'} cost",
            against=RAW,
            ours=ours,
            theirs=theirs,
            unit="us",
            ratio=ours / theirs,
            figure=extra[leaves],
            want=Want(_FIXED_US + _LEAF_US * leaves, "us"),
            note=f"{extra[leaves]:.1f} us more",
            details={"extra_us": extra[leaves]}
            | {name: timing.summary() for name, timing in timings.items()},
        )
    a_leaf = (extra[many] - extra[few]) / (many - few)
    yield Row(
        what="value_and_grads, fitted cost of a leaf",
        against=f"target: {_FIXED_US:.0f} us + {_LEAF_US} us a leaf",
        ours=a_leaf,
        theirs=_LEAF_US,
        unit="us",
        ratio=a_leaf / _LEAF_US,
        figure=a_leaf,
        want=Want(_LEAF_US, "us"),
        note=f"{extra[few] - a_leaf:.1f} us + {a_leaf:.2f} us a leaf",
        details={"fixed_us": extra[few] - a_leaf, "leaf_us": a_leaf},
    )


def _long_steps(plan: Plan) -> Iterator[Row]:
    for name, task in _long_tasks(plan).items():
        timings = measure(sides(task), plan.device, plan.effort)
        raw_ms = timings["raw"].typical / 1e6
        note = "" if raw_ms > 5 else f"a step of {raw_ms:.1f} ms is not over 5 ms"
        yield timed(
            f"value_and_grads, {name}",
            RAW,
            timings,
            theirs="raw",
            limit=1.10 if note else 1.01,
            note=note,
        )


def _long_tasks(plan: Plan) -> dict[str, Task]:
    if plan.quick:
        return {"MLP W8 D2 B4": models.deep(8, 2, 4, plan.device)}
    if plan.device.type == "cuda":
        return {
            "MLP W4096 D6 B2048": models.deep(4096, 6, 2048, plan.device),
            "200 params, W2048 B512": models.deep(2048, 100, 512, plan.device),
            "CNN C128 D6 B256": models.convolutional(128, 6, 256, plan.device),
        }
    return {
        "MLP W512 D4 B128": models.deep(512, 4, 128, plan.device),
        "200 params, W128 B128": models.deep(128, 100, 128, plan.device),
        "CNN C32 D2 B16": models.convolutional(32, 2, 16, plan.device),
    }
