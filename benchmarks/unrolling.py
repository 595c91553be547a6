"""Meta-gradients through an inner loop, against those who keep every step's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks import fresh, loops, memory, unrollers
from benchmarks.harness import Effort, Side, measure
from benchmarks.loops import Loop
from benchmarks.memory import Peak
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed
from benchmarks.unrollers import HIGHER, PLAIN, RECOMPUTE, SEGMENTS, STORE, TORCHOPT

_STORED = {PLAIN: 1.05, HIGHER: 1.0, TORCHOPT: None}


@dataclass(frozen=True, slots=True)
class Limits:
    """The targets where steps are recomputed.

    Attributes:
        memory: The largest ratio of peak memory, against everybody.
        time: That of time, against the plain loop.
    """

    memory: float
    time: float


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows where every graph is kept, and those where steps are recomputed."""
    every = tasks(plan)
    first, tiny, *others = every
    for against, limit in _STORED.items():
        yield _time(plan, first, STORE, against, limit)
    yield _time(plan, tiny, STORE, PLAIN, None)
    yield _time(plan, tiny, RECOMPUTE, PLAIN, None)
    for name, limits in zip(others, (Limits(1 / 6, 1.45), Limits(1 / 8, 1.35)), strict=True):
        yield from _memory(plan, name, limits.memory)
        yield from _times(plan, name, {RECOMPUTE: limits.time, SEGMENTS: None})


def tasks(plan: Plan) -> dict[str, Loop]:
    """Return the loops by name: small batches, a tiny net, large batches, and attention."""
    if plan.quick:
        dense, encoder, for_encoder, steps = ((4, 2), (3, 2), (4, 3)), (4, 2, 3), 2, 5
    else:
        dense, encoder, for_encoder, steps = (
            ((256, 64), (16, 8), (256, 2048)),
            (64, 4, 64),
            16,
            20,
        )
    features, heads, tokens = encoder
    return {
        f"MLP W{width} D3 B{batch} T{steps}": loops.dense(width, 3, batch, steps, plan.device)
        for width, batch in dense
    } | {
        f"encoder W{features} H{heads} B{for_encoder} S{tokens} T{steps}": loops.encoder(
            features, heads, tokens, for_encoder, steps, plan.device
        )
    }


def _time(plan: Plan, name: str, way: str, against: str, limit: float | None) -> Row:
    what = f"unroll, {way}, {name}"
    both: dict[str, Side] = {}
    for one in (way, against):
        side, problem = unrollers.side(one, tasks(plan)[name])
        if side is None:
            return Row(what=what, against=one, note=problem)
        both[one] = side
    effort = plan.effort if plan.quick else Effort(least=9)
    timings = measure(both, plan.device, effort)
    return timed(what, against, timings, ours=way, theirs=against, limit=limit)


def _times(plan: Plan, name: str, limits: Mapping[str, float | None]) -> Iterator[Row]:
    """Yield a row for each way, against the plain loop, where a call takes about a second.

    It is measured once for all: what a side leaves in the caches is nothing in a second.
    """
    sides: dict[str, Side] = {}
    for way in (*limits, PLAIN):
        side, problem = unrollers.side(way, tasks(plan)[name])
        if side is None:
            yield Row(what=f"unroll, {name}", against=way, note=problem)
            return
        sides[way] = side
    effort = plan.effort if plan.quick else Effort(least=3, seconds=0, warmup=1)
    timings = measure(sides, plan.device, effort)
    for way, limit in limits.items():
        what = f"unroll, {way}, {name}"
        yield timed(what, PLAIN, timings, ours=way, theirs=PLAIN, limit=limit)


def _memory(plan: Plan, name: str, limit: float) -> Iterator[Row]:
    """Yield the rows for peak memory of one loop, each way measured once."""
    every = (RECOMPUTE, SEGMENTS, PLAIN, HIGHER, TORCHOPT)
    problems = {way: unrollers.side(way, tasks(plan)[name])[1] for way in every}
    found = peaks(plan, name, [way for way in every if not problems[way]])
    taken = {way: peak for way, (peak,) in found.items()}
    for against in (PLAIN, HIGHER, TORCHOPT):
        yield _of_peaks(name, RECOMPUTE, against, limit, taken, problems)
    yield _of_peaks(name, SEGMENTS, PLAIN, None, taken, problems)


def _of_peaks(
    name: str,
    way: str,
    against: str,
    limit: float | None,
    taken: Mapping[str, Peak],
    problems: Mapping[str, str],
) -> Row:
    what = f"unroll, {way}, peak memory over the data, {name}"
    for one in (way, against):
        if problems[one]:
            return Row(what=what, against=one, note=problems[one])
    ours, theirs = taken[way], taken[against]
    ratio = ours.total / theirs.total
    return Row(
        what=what,
        against=against,
        ours=ours.total / 1e6,
        theirs=theirs.total / 1e6,
        unit="MB",
        ratio=ratio,
        figure=ratio,
        want=None if limit is None else Want(limit),
        details={way: asdict(ours), against: asdict(theirs)},
    )


def peaks(
    plan: Plan, name: str, ways: Sequence[str], steps: Sequence[int] = ()
) -> dict[str, list[Peak]]:
    """Return the peaks of ways over their data.

    Args:
        plan: What the run is asked for.
        name: Which of the `tasks`.
        ways: Which of `unrollers.WAYS`.
        steps: Numbers of steps, in place of the one that the task has.

    Returns:
        For each way, one peak for each number of steps.
    """
    if plan.quick:
        return {way: _peaks(plan, name, way, steps) for way in ways}
    found = fresh.call(
        "benchmarks.unrolling:peaks_here",
        name=name,
        ways=list(ways),
        steps=list(steps),
        device=str(plan.device),
    )
    return {way: [Peak(**peak) for peak in of_way] for way, of_way in found.items()}


def peaks_here(
    name: str, ways: list[str], steps: list[int], device: str
) -> dict[str, list[dict[str, int]]]:
    """Return the peaks of ways as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    plan = Plan(torch.device(device))
    return {way: [asdict(peak) for peak in _peaks(plan, name, way, steps)] for way in ways}


def _peaks(plan: Plan, name: str, way: str, steps: Sequence[int]) -> list[Peak]:
    task = tasks(plan)[name]
    make = unrollers.WAYS[way]
    first = make(replace(task, steps=2))
    first.run(first.build())  # libraries set up memory of their own in the first call
    return [_over_the_data(make(replace(task, steps=n)), plan) for n in steps or (task.steps,)]


def _over_the_data(side: Side, plan: Plan) -> Peak:
    data = side.build()
    return memory.peak(Side(lambda: data, side.run), plan.device)
