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
    sizes = {count: replace(size, count=count) for count in counts}
    found = {
        way: dict(zip(counts, _peaks(plan, way, list(sizes.values())), strict=True))
        for way in ("gradkit", "raw")
    }
    for count in counts:
        yield _total(sizes[count], found["gradkit"][count], found["raw"][count])
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


def _peaks(plan: Plan, way: str, sizes: list[Size]) -> list[Peak]:
    if plan.quick:
        return [_peak(way, size, plan.device) for size in sizes]
    found = fresh.call(
        "benchmarks.peaks:peaks_here",
        way=way,
        device=str(plan.device),
        sizes=[asdict(size) for size in sizes],
    )
    return [Peak(**peak) for peak in found]


def peaks_here(way: str, device: str, sizes: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Return the peaks of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    return [asdict(_peak(way, Size(**size), torch.device(device))) for size in sizes]


def _peak(way: str, size: Size, device: torch.device) -> Peak:
    side = heads.sides(size.task(device))[way]
    side.run(side.build())  # libraries set up memory of their own in the first call
    return memory.peak(side, device)
