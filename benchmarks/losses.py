"""A gradient for each of several losses on one trunk, against the obvious loop and TorchJD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks import heads, players
from benchmarks.harness import Timing, measure
from benchmarks.heads import LOOP, TORCHJD, Peer, Size
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_SIZES = (
    *(Size(64, 3, 32, count) for count in (2, 8, 32)),
    Size(64, 3, 32, 8, shared=True),
    *(Size(256, 6, 64, count) for count in (8, 32)),
    Size(256, 6, 64, 8, shared=True),
    Size(512, 8, 128, 8),
)
_QUICK = (Size(8, 2, 4, 2),)
# Results of megabytes, where it matters what becomes of freed memory.
_LARGE = (Size(256, 6, 64, 8),)


def rows(plan: Plan) -> Iterator[Row]:
    """Yield two rows for each size, and the players'."""
    for size in _QUICK if plan.quick else _SIZES:
        what, task = f"per_loss_grads, {size}", size.task(plan.device)
        both = measure(heads.sides(task), plan.device, plan.effort)
        yield timed(what, LOOP, both, theirs="raw", limit=_limit(size))
        peer = heads.torchjd(task, size.count, plan.device)
        yield _against_torchjd(what, size, _with_torchjd(plan, task, peer), peer)
    yield from players.rows(plan)


def _limit(size: Size) -> float:
    """Return the largest ratio to the loop: a small pass shows what a call costs at all."""
    return 1.12 if size.width <= 64 else 1.03


def _with_torchjd(plan: Plan, task: Task, peer: Peer) -> dict[str, Timing]:
    if not peer.sides:
        return {}
    return measure({"gradkit": heads.sides(task)["gradkit"]} | peer.sides, plan.device, plan.effort)


def _against_torchjd(what: str, size: Size, timings: Mapping[str, Timing], peer: Peer) -> Row:
    if peer.problem:
        return Row(what=what, against=TORCHJD, note=peer.problem)
    return timed(
        what,
        peer.name,
        timings,
        theirs="torchjd",
        limit=0.75 if size == Size(256, 6, 64, 8) else 1.0,
        details={"chunk_ms": peer.tried},
    )
