"""What a gradient for each of several losses takes in memory, and as their number grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks import fresh, heads, memory
from benchmarks.heads import LOOP, Size
from benchmarks.memory import Peak
from benchmarks.plan import Plan
from benchmarks.row import Row, Want


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows for peak memory, and the one for what it is without the results."""
    size = Size(8, 2, 4, 2) if plan.quick else Size(256, 6, 64, 2)
    counts = (2, 4) if plan.quick else (2, 8, 32)
    found = {
        way: {count: _peak(plan, way, replace(size, count=count)) for count in counts}
        for way in ("gradkit", "raw")
    }
    for count in counts:
        yield _total(replace(size, count=count), found["gradkit"][count], found["raw"][count])
    yield _beyond(found["gradkit"], found["raw"])


def _total(size: Size, ours: Peak, theirs: Peak) -> Row:
    ratio = ours.total / theirs.total
    return Row(
        what=f"per_loss_grads, peak memory, {size}",
        against=LOOP,
        ours=ours.total / 1e6,
        theirs=theirs.total / 1e6,
        unit="MB",
        ratio=ratio,
        figure=ratio,
        want=Want(1.0),
        details={"gradkit": ours, "raw": theirs},
    )


def _beyond(ours: Mapping[int, Peak], theirs: Mapping[int, Peak]) -> Row:
    least, most = min(ours), max(ours)
    ratio = ours[most].beyond / ours[least].beyond
    raw = (f"{theirs[count].beyond / 1e3:.1f}" for count in (least, most))
    return Row(
        what=f"per_loss_grads, peak memory less results, K{most}",
        against=f"itself at K{least}",
        ours=ours[most].beyond / 1e3,
        theirs=ours[least].beyond / 1e3,
        unit="kB",
        ratio=ratio,
        figure=ratio,
        want=Want(1.01),
        note=f"the loop: {' to '.join(raw)} kB",
        details={
            "losses": list(ours),
            "gradkit_bytes": [peak.beyond for peak in ours.values()],
            "raw_bytes": [peak.beyond for peak in theirs.values()],
        },
    )


def _peak(plan: Plan, way: str, size: Size) -> Peak:
    if plan.quick:
        return memory.peak(heads.sides(size.task(plan.device))[way], plan.device)
    found = fresh.call(
        "benchmarks.peaks:peak_here",
        memory.ENVIRONMENT,
        way=way,
        device=str(plan.device),
        size=asdict(size),
    )
    return Peak(**found)


def peak_here(way: str, device: str, size: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the peak of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    place = torch.device(device)
    side = heads.sides(Size(**size).task(place))[way]
    resident = memory.resident_peak(side) if place.type == "cpu" else None
    return asdict(replace(memory.peak(side, place), resident=resident))
