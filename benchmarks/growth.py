"""How calls grow with leaves, losses, tensors kept and inner steps: linearly, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from statistics import linear_regression

from benchmarks import heads, loops, models, retaining, unrollers, unrolling, values
from benchmarks.harness import Effort, Side, measure
from benchmarks.heads import Size
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_DOUBLING = 2.2
_TIME, _MEMORY = "time of a call, ms", "peak memory over the data, MB"
_STEPS, _FEW_STEPS = (5, 10, 20, 40), (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Axis:
    """Something there may be more of.

    Attributes:
        noun: What.
        what: The call.
        against: The other side, in words.
        counts: How many of it.
        quick: How many in a quick run.
        sides: Gives both sides, "gradkit" and "raw", for a number of it.
    """

    noun: str
    what: str
    against: str
    counts: Sequence[int]
    quick: Sequence[int]
    sides: Callable[[int], dict[str, Side]]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each axis; its details are what is drawn."""
    for axis in _axes(plan):
        counts = axis.quick if plan.quick else axis.counts
        yield _row(axis, counts, _measure(plan, axis, counts), _TIME)
    yield from _memory_of_steps(plan)


def _memory_of_steps(plan: Plan) -> Iterator[Row]:
    counts = _FEW_STEPS if plan.quick else _STEPS
    name = next(iter(unrolling.tasks(plan)))
    found = unrolling.peaks(plan, name, (unrollers.PLAIN, *_MODES), counts)
    taken = {way: [peak.total / 1e6 for peak in peaks] for way, peaks in found.items()}
    for axis in _steps(plan):
        way = axis.what.removeprefix("unroll, ")
        both = {"gradkit": taken[way], "raw": taken[unrollers.PLAIN]}
        yield _row(axis, counts, both, _MEMORY)


def _measure(plan: Plan, axis: Axis, counts: Sequence[int]) -> dict[str, list[float]]:
    """Return for both sides the milliseconds by count, all counts in one interleaved run.

    Apart, a slow spell of the machine would look like growth.
    """
    sides = {(way, count): side for count in counts for way, side in axis.sides(count).items()}
    effort = plan.effort if plan.quick else Effort(least=9, seconds=2.5)
    timings = measure(sides, plan.device, effort)
    return {
        way: [timings[way, count].typical / 1e6 for count in counts] for way in ("gradkit", "raw")
    }


def _axes(plan: Plan) -> list[Axis]:
    return [
        Axis(
            "leaves",
            "value_and_grads",
            values.RAW,
            (50, 100, 200, 400, 800),
            (2, 4, 8),
            lambda count: values.sides(models.deep(16, count // 2, 16, plan.device)),
        ),
        Axis(
            "losses",
            "per_loss_grads",
            heads.LOOP,
            (2, 4, 8, 16, 32, 64),
            (2, 3, 4),
            lambda count: heads.sides(Size(64, 3, 32, count).task(plan.device)),
        ),
        Axis(
            "tensors kept",
            "safe_retain",
            retaining.RETAIN_GRAD,
            (10, 20, 40, 80, 160),
            (2, 3, 4),
            lambda count: retaining.sides(64, count, 32, plan.device),
        ),
        *_steps(plan),
    ]


_MODES = (unrollers.STORE, unrollers.RECOMPUTE, unrollers.SEGMENTS)


def _steps(plan: Plan) -> list[Axis]:
    def sides(way: str, count: int) -> dict[str, Side]:
        task = loops.dense(128, 3, 32, count, plan.device)
        return {"gradkit": unrollers.WAYS[way](task), "raw": unrollers.WAYS[unrollers.PLAIN](task)}

    return [
        Axis(
            "inner steps",
            f"unroll, {way}",
            unrollers.PLAIN,
            _STEPS,
            _FEW_STEPS,
            partial(sides, way),
        )
        for way in _MODES
    ]


def _row(
    axis: Axis, counts: Sequence[int], taken: Mapping[str, Sequence[float]], quantity: str
) -> Row:
    ours, theirs = (_per_doubling(counts, taken[way]) for way in ("gradkit", "raw"))
    memory = " of memory" if quantity == _MEMORY else ""
    return Row(
        what=f"{axis.what}, growth{memory} when {axis.noun} double, {counts[0]} to {counts[-1]}",
        against=axis.against,
        ours=ours,
        theirs=theirs,
        unit="x",
        ratio=ours / theirs,
        figure=ours,
        want=Want(_DOUBLING),
        details={
            "noun": axis.noun,
            "what": axis.what,
            "against": axis.against,
            "counts": list(counts),
            "quantity": quantity,
            "gradkit": taken["gradkit"],
            "raw": taken["raw"],
        },
    )


def _per_doubling(counts: Sequence[int], taken: Sequence[float]) -> float:
    """Return by what factor a call grows when the count doubles, fitted over the larger counts."""
    points = [(log(n), log(t)) for n, t in zip(counts, taken, strict=True)][len(counts) // 3 :]
    slope, _ = linear_regression(*zip(*points, strict=True))
    return float(2**slope)
