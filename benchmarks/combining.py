"""Many gradients into one: gram and combine, against TorchJD's UPGrad on its matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import gradkit
from benchmarks import fresh, memory, peers
from benchmarks.harness import Effort, Side, measure
from benchmarks.heads import Size
from benchmarks.memory import Peak
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed

_SIZES = (
    Size(64, 3, 32, 8, shared=True),
    Size(16, 100, 16, 8, shared=True),
    Size(1024, 5, 64, 8, shared=True),
)
_QUICK = (Size(8, 2, 4, 3, shared=True),)
_TORCHJD = "TorchJD jac_to_grad"
_MATRIX = "the matrix of the gradients"
_WAYS = ("weights", "jac_kept")  # whose peaks are taken
_WEIGHED = "combine with UPGradWeighting"


@dataclass(frozen=True, slots=True)
class Contest:
    """Two ways to hold against each other.

    Attributes:
        what: Ours.
        ours: Its name among the sides.
        against: The other.
        theirs: Its name among the sides.
        limit: The target: the largest ratio, or None.
    """

    what: str
    ours: str
    against: str
    theirs: str
    limit: float | None


_CONTESTS = (
    Contest(_WEIGHED, "weights", f"{_TORCHJD} with UPGrad", "jac_to_grad", 1.0),
    Contest(_WEIGHED, "weights", "TorchJD UPGrad, matrix made before", "matrix", 1.0),
    Contest(_WEIGHED, "weights", f"{_TORCHJD} without a matrix", "gramian", None),
    Contest("combine with UPGrad", "function", f"{_TORCHJD} with UPGrad", "jac_to_grad", None),
)


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each size the rows for time, and the one for peak memory."""
    # Most of a round is what comes before: the gradients of each loss, anew for each side.
    effort = plan.effort if plan.quick else Effort(least=9)
    for size in _QUICK if plan.quick else _SIZES:
        every, problem = _tried(size, plan.device)
        for contest in _CONTESTS:
            what = f"{contest.what}, {size}"
            if problem:
                yield Row(what=what, against=contest.against, note=problem)
                continue
            pair = {name: every[name] for name in (contest.ours, contest.theirs)}
            yield timed(
                what,
                contest.against,
                measure(pair, plan.device, effort),
                ours=contest.ours,
                theirs=contest.theirs,
                limit=contest.limit,
            )
        what = f"{_WEIGHED}, peak memory over the gradients, {size}"
        if problem:
            yield Row(what=what, against=_MATRIX, note=problem)
        else:
            yield _memory(plan, what, size)


def _tried(size: Size, device: torch.device) -> tuple[dict[str, Side], str]:
    """Return the sides, each of which has run once, or why one does not."""

    def make() -> dict[str, Side]:
        every = sides(size.task(device))
        for side in every.values():
            side.run(side.build())
        return every

    every, problem = peers.found(make)
    return every or {}, problem


def sides(task: Task) -> dict[str, Side]:
    """Return the ways to get one gradient from the gradients that a library has found itself.

    Raises:
        ImportError: TorchJD is not installed.
    """
    aggregation = import_module("torchjd.aggregation")
    weighting, aggregator = aggregation.UPGradWeighting(), aggregation.UPGrad()

    def trees() -> Any:
        return gradkit.per_loss_grads(task.build(), task.params)

    return {
        "weights": Side(trees, lambda t: gradkit.combine(t, weighting)),
        "function": Side(trees, lambda t: gradkit.combine(t, aggregator)),
        "matrix": Side(lambda: gradkit.tree.to_matrix(trees())[0], aggregator),
        "jac_to_grad": _jac_to_grad(task, aggregator),
        "jac_kept": _jac_to_grad(task, aggregator, retain_jac=True),
        "gramian": _jac_to_grad(task, aggregator, optimize_gramian_computation=True),
    }


def _jac_to_grad(task: Task, aggregator: Callable[[Tensor], Tensor], **options: bool) -> Side:
    """Return TorchJD's way from the Jacobians that it has left at the params to their `.grad`."""
    autojac = import_module("torchjd.autojac")
    params = list(task.params.values())

    def build() -> None:
        for param in params:
            param.grad = None
            vars(param).pop("jac", None)
        autojac.backward(task.build(), inputs=params)

    def run(_: None) -> list[Tensor | None]:
        autojac.jac_to_grad(params, aggregator, **options)
        return [param.grad for param in params]

    return Side(build, run)


def _memory(plan: Plan, what: str, size: Size) -> Row:
    ours, theirs = _peaks(plan, size)
    columns = sum(param.numel() for param in size.task(plan.device).params.values())
    matrix = 4 * size.count * columns
    ratio = ours.total / matrix
    return Row(
        what=what,
        against=_MATRIX,
        ours=ours.total / 1e6,
        theirs=matrix / 1e6,
        unit="MB",
        ratio=ratio,
        figure=ratio,
        want=Want(1.0),
        note=f"the result: {ours.results / 1e6:.3g} MB; {_TORCHJD}: {theirs.total / 1e6:.3g} MB",
        details={"gradkit": asdict(ours), "torchjd": asdict(theirs), "matrix_bytes": matrix},
    )


def _peaks(plan: Plan, size: Size) -> list[Peak]:
    if plan.quick:
        return [_over_its_inputs(way, size, plan.device) for way in _WAYS]
    found = fresh.call(
        "benchmarks.combining:peaks_here", size=asdict(size), device=str(plan.device)
    )
    return [Peak(**peak) for peak in found]


def peaks_here(size: dict[str, Any], device: str) -> list[dict[str, int]]:
    """Return the peaks of both ways as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    place = torch.device(device)
    return [asdict(_over_its_inputs(way, Size(**size), place)) for way in _WAYS]


def _over_its_inputs(way: str, size: Size, device: torch.device) -> Peak:
    side = sides(size.task(device))[way]
    side.run(side.build())  # libraries set up memory of their own in the first call
    inputs = side.build()
    return memory.peak(Side(lambda: inputs, side.run), device)
