"""How time grows with the number of leaves, of losses, of tensors kept: linearly, on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import linear_regression

from benchmarks import heads, models, retaining, values
from benchmarks.harness import Effort, Side, measure
from benchmarks.heads import Size
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_DOUBLING = 2.2


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
        yield _row(axis, counts, _measure(plan, axis, counts))


def _measure(plan: Plan, axis: Axis, counts: Sequence[int]) -> dict[str, list[float]]:
    """Return for both sides the milliseconds by count, all counts in one interleaved run.

    Apart, a slow spell of the machine would look like growth.
    """
    sides = {(way, count): side for count in counts for way, side in axis.sides(count).items()}
    effort = plan.effort if plan.quick else Effort(most=100, seconds=12)
    timings = measure(sides, plan.device, effort)
    return {
        way: [timings[way, count].median / 1e6 for count in counts] for way in ("gradkit", "raw")
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
    ]


def _row(axis: Axis, counts: Sequence[int], times: Mapping[str, Sequence[float]]) -> Row:
    ours, theirs = (_per_doubling(counts, times[way]) for way in ("gradkit", "raw"))
    return Row(
        what=f"{axis.what}, growth when {axis.noun} double, {counts[0]} to {counts[-1]}",
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
            "gradkit_ms": times["gradkit"],
            "against_ms": times["raw"],
        },
    )


def _per_doubling(counts: Sequence[int], taken: Sequence[float]) -> float:
    """Return by what factor time grows when the count doubles, fitted over the larger counts."""
    points = [(log(n), log(t)) for n, t in zip(counts, taken, strict=True)][len(counts) // 3 :]
    slope, _ = linear_regression(*zip(*points, strict=True))
    return float(2**slope)
