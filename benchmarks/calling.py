"""A module called with other tensors: make_functional's call, against functional_call."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradkit
from benchmarks.harness import Side, measure
from benchmarks.nets import NETS
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

RAW = "functional_call"


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each network."""
    for name in list(NETS)[:1] if plan.quick else NETS:
        model = NETS[name].make().to(plan.device)
        both = sides(model, NETS[name].batch(plan.device))
        timings = measure(both, plan.device, plan.effort)
        what = f"call of func.make_functional, {name}"
        yield timed(what, RAW, timings, theirs="raw", limit=None)


def sides(model: nn.Module, batch: Tensor) -> dict[str, Side]:
    """Return both ways to run a module's forward pass on its own parameters."""
    call, params, buffers = gradkit.func.make_functional(model)

    def ours(x: Tensor) -> object:
        return call(params, buffers, x)

    def raw(x: Tensor) -> object:
        return functional_call(model, params, (x,))

    return {"gradkit": Side(lambda: torch.clone(batch), ours), "raw": Side(lambda: batch, raw)}
