"""The loss and gradient of a function, against torch.func."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.func import grad_and_value

import gradkit
from benchmarks import models
from benchmarks.harness import Side, measure
from benchmarks.models import Function
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

GRAD_AND_VALUE = "torch.func.grad_and_value"
# Width, depth, samples.
SIZES = {
    "5 layers, 16 wide": (16, 5, 16),
    "200 params, 16 wide": (16, 100, 16),
    "6 layers, 256 wide": (256, 6, 64),
}
SMALL = {"2 layers, 4 wide": (4, 2, 3)}


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each size."""
    for name, size in (SMALL if plan.quick else SIZES).items():
        both = sides(models.layers(*size, plan.device))
        timings = measure(both, plan.device, plan.effort)
        what = f"func.value_and_grads, {name}"
        yield timed(what, GRAD_AND_VALUE, timings, theirs="raw", limit=1.10)


def sides(task: Function) -> dict[str, Side]:
    """Return gradkit's way and torch's."""
    ours, raw = gradkit.func.value_and_grads(task.fn), grad_and_value(task.fn)

    def run_ours(batch: Tensor) -> object:
        return ours(task.params, batch)

    def run_raw(batch: Tensor) -> object:
        return raw(task.params, batch)

    return {"gradkit": Side(task.build, run_ours), "raw": Side(task.build, run_raw)}
