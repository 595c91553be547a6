"""Two processes over gloo: gradkit.distributed against DistributedDataParallel's backward."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import fresh, replicas
from benchmarks.harness import Effort, Side, Timing, measure
from benchmarks.heads import Size
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_RANKS = 2
_ROUNDS = 30
_OTHERS = (replicas.PASSES, replicas.LOOP)
# As in `stepping`: two hundred small tensors, and twenty megabytes of large ones.
_STEPS = {"200 params, 16 wide": (16, 100, 16), "20 MB of params, 1024 wide": (1024, 5, 64)}
_SIZES = (Size(256, 6, 64, 2), Size(256, 6, 64, 8))
_LIMITS = dict(zip(_STEPS, (1.3, 1.1), strict=True))  # the targets
_QUICK_STEPS = {"8 params, 4 wide": (4, 4, 2)}
_QUICK_SIZES = (Size(4, 2, 3, 2),)


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows of steps, of the gradients of several losses, and of what is sent."""
    if plan.device.type != "cpu":
        note = "it is measured over gloo, on the CPU: --device cpu"
        yield Row(what="gradkit.distributed, 2 processes", against=replicas.DDP, note=note)
        return
    steps = _QUICK_STEPS if plan.quick else _STEPS
    sizes = _QUICK_SIZES if plan.quick else _SIZES
    shapes = [list(shape) for shape in steps.values()]
    found = _on_ranks(
        plan,
        "compare",
        shapes=shapes,
        sizes=[asdict(size) for size in sizes],
        rounds=3 if plan.quick else _ROUNDS,
    )
    for name, samples in zip(steps, found["steps"], strict=True):
        what = f"distributed.value_and_grads and step_, {_processes(plan)}, {name}"
        yield _timed(what, replicas.DDP, samples, _LIMITS.get(name))
    for size, of_size in zip(sizes, found["losses"], strict=True):
        yield from _per_loss(plan, size, of_size)


def _per_loss(plan: Plan, size: Size, found: Mapping[str, Any]) -> Iterator[Row]:
    what = f"distributed.per_loss_grads with the forward pass, {_processes(plan)}, {size}"
    for against in _OTHERS:
        yield _timed(what, against, found["samples"][against])
    for against in _OTHERS:
        for quantity, unit in (("collectives", "collectives"), ("what a rank sends", "MB")):
            what = f"distributed.per_loss_grads, {quantity}, {size}"
            yield _counted(what, against, found["sent"], unit)


def _counted(what: str, against: str, sent: Mapping[str, list[int]], unit: str) -> Row:
    """Return a row of a count, which has no limit."""

    def figure(name: str) -> float:
        return len(sent[name]) if unit == "collectives" else sum(sent[name]) / 1e6

    ours, theirs = figure("gradkit"), figure(against)
    return Row(
        what=what,
        against=against,
        ours=ours,
        theirs=theirs,
        unit=unit,
        ratio=ours / theirs,
        note="one of ours is a message of 64 bytes" if unit == "collectives" else "",
        details={name: sent[name] for name in ("gradkit", against)},
    )


def _processes(plan: Plan) -> str:
    return "1 process" if plan.quick else f"{_RANKS} processes"


def _timed(
    what: str, against: str, samples: Mapping[str, list[int]], limit: float | None = None
) -> Row:
    timings = {name: Timing(tuple(taken)) for name, taken in samples.items()}
    return timed(what, against, timings, theirs=against, limit=limit)


def _on_ranks(plan: Plan, function: str, **arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        arguments["rendezvous"] = str(Path(folder) / "rendezvous")
        if not plan.quick:
            return fresh.ranks(f"benchmarks.processes:{function}", _RANKS, **arguments)
        here: Any = globals()[function]
        return here(rank=0, ranks=1, **arguments)


def compare(
    shapes: list[list[int]], sizes: list[dict[str, Any]], rounds: int, **group: Any
) -> dict[str, list[Any]]:
    """Return the samples of all methods, and what they send, as plain values; what a rank runs."""
    with replicas.group(**group):
        steps = [_samples(replicas.step_sides(*shape), rounds) for shape in map(_shape, shapes)]
        return {"steps": steps, "losses": [_compare_losses(Size(**s), rounds) for s in sizes]}


def _shape(shape: list[int]) -> tuple[int, int, int]:
    width, depth, batch = shape
    return width, depth, batch


def _compare_losses(size: Size, rounds: int) -> dict[str, Any]:
    if not replicas.agree(size):
        raise ValueError("the methods for the gradients of each loss do not agree")
    sides = replicas.per_loss_sides(size)
    samples = {
        against: _samples({name: sides[name] for name in ("gradkit", against)}, rounds)
        for against in _OTHERS
    }
    return {"samples": samples, "sent": {n: replicas.collectives(s) for n, s in sides.items()}}


def _samples(sides: dict[str, Side], rounds: int) -> dict[str, list[int]]:
    # The same number of rounds on all ranks, whatever the time: otherwise a rank would hang.
    effort = Effort(least=rounds, most=rounds, seconds=0)
    # gloo and DDP's reducer work in threads of their own.
    timings = measure(sides, torch.device("cpu"), effort, time.process_time_ns)
    return {name: list(timing.samples) for name, timing in timings.items()}
