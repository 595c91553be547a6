"""Keeping the gradients of intermediate tensors through a training step, against retain_grad()."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import gradkit
from benchmarks import models
from benchmarks.harness import Side, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

RETAIN_GRAD = "retain_grad() on the same"


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each size of a ten-layer MLP whose layers' outputs are kept."""
    for width, batch in ((8, 4),) if plan.quick else ((64, 32), (256, 64), (512, 128)):
        timings = measure(sides(width, 10, batch, plan.device), plan.device, plan.effort)
        yield timed(
            f"safe_retain of 10 tensors, step of an MLP W{width} B{batch}",
            RETAIN_GRAD,
            timings,
            theirs="raw",
            limit=1.05,
        )


def sides(width: int, depth: int, batch: int, device: torch.device) -> dict[str, Side]:
    """Return the ways to keep what each layer of an MLP puts out, forward pass included."""
    model = models.mlp(width, depth).to(device)

    def build() -> Tensor:
        model.zero_grad()
        return torch.randn(batch, width, device=device)

    def ours(inputs: Tensor) -> object:
        loss, kept = models.staged(model, inputs)
        with gradkit.safe_retain(kept) as retained:
            loss.backward()  # type: ignore[no-untyped-call]
        return retained.grads

    def raw(inputs: Tensor) -> object:
        loss, kept = models.staged(model, inputs)
        for tensor in kept:
            tensor.retain_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return [tensor.grad for tensor in kept]

    return {"gradkit": Side(build, ours), "raw": Side(build, raw)}
