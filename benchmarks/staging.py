"""A contrastive loss of a whole batch, differentiated in stages, against the graph of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, normalize

import gradkit
from benchmarks import fresh, memory, models
from benchmarks.harness import Effort, Side, measure
from benchmarks.memory import Peak
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_WHOLE = "the whole batch at once"
_CHUNKS = (8, 32)  # into so many
# Of time, by the chunks and the width: a loop by hand takes 1.43 to 1.46 where this is 1.45.
_LIMITS = {(8, 4): 1.45, (8, 512): 1.45}


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows for time and for peak memory, by the number of chunks."""
    effort = plan.effort if plan.quick else Effort(least=9)
    # Of the second, parameters take more memory than what a batch leaves in the graph.
    for width, batch in ((4, 32),) if plan.quick else ((512, 2048), (2048, 512)):
        every = sides(width, batch, plan.device)
        whole = _peak_of(plan, _WHOLE, width, batch)
        for count in _CHUNKS:
            name = _name(count)
            what = f"func.staged_value_and_grads, {name}, W{width} D4 B{batch}"
            pair = {"gradkit": every[name], _WHOLE: every[_WHOLE]}
            timings = measure(pair, plan.device, effort)
            limit = _LIMITS.get((count, width))
            yield timed(what, _WHOLE, timings, theirs=_WHOLE, limit=limit)
            peak = _peak_of(plan, name, width, batch)
            yield memory.row(what, _WHOLE, peak, whole, 1.0)


def _name(count: int) -> str:
    return f"{count} chunks"


def sides(width: int, batch: int, device: torch.device) -> dict[str, Side]:
    """Return the ways to differentiate, for a batch of two views of each sample."""
    model = models.mlp(width, 4, outputs=64).to(device)
    params = {name: param.detach() for name, param in model.named_parameters()}

    def build() -> Tensor:
        return torch.randn(batch // 2, 2, width, device=device)

    def encode(params: dict[str, Tensor], views: Tensor) -> Tensor:
        return normalize(functional_call(model, params, (views,)), dim=-1)

    def loss(outputs: Tensor) -> Tensor:
        left, right = outputs.unbind(1)
        return cross_entropy(10 * left @ right.T, torch.arange(len(left), device=left.device))

    whole = gradkit.func.value_and_grads(
        lambda params, views: loss(encode(params, views)), create_graph=False
    )
    found = {_WHOLE: Side(build, lambda views: whole(params, views))}
    for count in _CHUNKS:
        size = max(1, batch // 2 // count)
        step = gradkit.func.staged_value_and_grads(
            encode, loss, chunk_size=size, create_graph=False
        )
        found[_name(count)] = Side(build, lambda views, step=step: step(params, views))  # type: ignore[misc]
    return found


def _peak_of(plan: Plan, name: str, width: int, batch: int) -> Peak:
    arguments: dict[str, Any] = {"name": name, "width": width, "batch": batch}
    if plan.quick:
        return _peak(plan.device, **arguments)
    here = "benchmarks.staging:peak_here"
    return Peak(**fresh.call(here, device=str(plan.device), **arguments))


def peak_here(device: str, name: str, width: int, batch: int) -> dict[str, int]:
    """Return the peak of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    return asdict(_peak(torch.device(device), name, width, batch))


def _peak(device: torch.device, name: str, width: int, batch: int) -> Peak:
    side = sides(width, batch, device)[name]
    side.run(side.build())  # libraries set up memory of their own in the first call
    return memory.peak(side, device)
