"""A gradient for each sample of a batch, against the libraries that are made for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TypeAlias

import torch

from benchmarks import fresh, memory, models, samplers
from benchmarks.harness import Side, measure
from benchmarks.memory import Peak
from benchmarks.models import Classifier
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_BATCH = 128
_CHUNKS = (None, 32, 8)
_WAYS = ("gradkit", "raw")
Way: TypeAlias = tuple[str, str, int | None]  # model, gradkit or torch, and the size of a chunk


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each model and peer, and the rows for memory as the chunks shrink."""
    every_task = tasks(plan)
    for name, task in every_task.items():  # first: the other libraries register hooks
        for peer in (samplers.VMAP, "ExpandedWeights"):
            ours = samplers.eager(task)
            yield _against(plan, f"per_loss_grads, auto, {name}", task, ours, peer)
    for name, task in every_task.items():
        for peer in samplers.PEERS:
            ours = samplers.gradkits(task)
            yield _against(plan, f"per_sample_grads, {name}", task, ours, peer)
    every = _peaks(plan)
    for name in every_task:
        yield from _memory(name, every)


def tasks(plan: Plan) -> dict[str, Classifier]:
    """Return the models, by name."""
    if plan.quick:
        return {"MLP": models.dense_classifier(4, 1, 3, plan.device)} | _cnns(2, 4, 3, plan.device)
    dense = ((64, 3), (1024, 3) if plan.device.type == "cuda" else (256, 2))
    return {
        f"MLP W{width} D{depth} B{_BATCH}": models.dense_classifier(
            width, depth, _BATCH, plan.device
        )
        for width, depth in dense
    } | _cnns(16, 32, _BATCH, plan.device)


def _cnns(channels: int, side: int, batch: int, device: torch.device) -> dict[str, Classifier]:
    return {
        f"CNN{' pooled' if pooled else ''} C{channels} 3x{side}x{side} B{batch}": (
            models.convolutional_classifier(channels, (3, side, side), batch, device, pooled=pooled)
        )
        for pooled in (False, True)
    }


def _against(plan: Plan, what: str, task: Classifier, ours: Side, name: str) -> Row:
    # To be as fast as the best of them is to be as fast as each.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both hook libraries make torch warn of their hooks
        side, problem = samplers.peer(name, task)
        if problem:
            return Row(what=what, against=name, note=problem)
        both = {"gradkit": ours} | side
        timings = measure(both, plan.device, plan.effort)
    return timed(what, name, timings, theirs=name, limit=1.05)


def _memory(name: str, every: Mapping[Way, Peak]) -> Iterator[Row]:
    """Yield a row for each size of a chunk: what the call takes besides its results."""
    found = {way: {size: every[name, way, size] for size in _CHUNKS} for way in _WAYS}
    whole = found["gradkit"][None]
    for size in _CHUNKS:
        ours, theirs = found["gradkit"][size], found["raw"][size]
        first = size is None
        against = theirs if first else whole
        yield Row(
            what=f"per_sample_grads, peak memory less results, {_said(size)}, {name}",
            against=samplers.VMAP if first else "itself, all samples at once",
            ours=ours.beyond / 1e6,
            theirs=against.beyond / 1e6,
            unit="MB",
            ratio=ours.beyond / against.beyond,
            note=f"the results: {ours.results / 1e6:.1f} MB"
            if first
            else f"{samplers.VMAP}: {theirs.beyond / 1e6:.3g} MB",
            details={"gradkit": asdict(ours), "raw": asdict(theirs)},
        )


def _said(size: int | None) -> str:
    return "all samples at once" if size is None else f"chunks of {size}"


def _peaks(plan: Plan) -> dict[Way, Peak]:
    every = [(name, way, size) for name in tasks(plan) for way in _WAYS for size in _CHUNKS]
    if plan.quick:
        return {one: memory.peak(_side(plan, *one), plan.device) for one in every}
    found = fresh.call("benchmarks.samples:peaks_here", every=every, device=str(plan.device))
    return {one: Peak(**peak) for one, peak in zip(every, found, strict=True)}


def peaks_here(every: list[Way], device: str) -> list[dict[str, int]]:
    """Return the peaks of calls as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    plan = Plan(torch.device(device))
    return [asdict(_warm_peak(_side(plan, *one), plan)) for one in every]


def _warm_peak(side: Side, plan: Plan) -> Peak:
    side.run(side.build())  # libraries set up memory of their own in the first call
    return memory.peak(side, plan.device)


def _side(plan: Plan, name: str, way: str, size: int | None) -> Side:
    make: Callable[[Classifier, int | None], Side] = (
        samplers.gradkits if way == "gradkit" else samplers.vmapped
    )
    return make(tasks(plan)[name], size)
