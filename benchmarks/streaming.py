"""The Gramian of several losses, without their gradients: against K sets of them, and TorchJD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import gradkit
from benchmarks import fresh, memory, models, peers
from benchmarks.harness import Effort, Side, measure
from benchmarks.heads import Size
from benchmarks.memory import Peak
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_LARGE = Size(1024, 8, 16, 8)
_SIZES = (_LARGE, Size(64, 8, 16, 8))
_QUICK = (Size(8, 2, 4, 3),)
_SETS, _AUTOGRAM = "tree.gram(per_loss_grads)", "TorchJD autogram"
_JAC = "TorchJD backward, jac_to_grad"
# Ours, theirs, what theirs is called, the largest ratio of times, and that of peaks.
_CONTESTS = (
    ("gram", "sets", _SETS, 1.1, 0.3),
    ("gram", "autogram", _AUTOGRAM, 1.0, 1.0),
    ("weights", "jac_to_grad", _JAC, 1.0, 1.0),
)
_CALLS = {"gram": "gram", "weights": "value_and_grads, weights=UPGradWeighting()"}


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each size the rows for time, and for a large one those for peak memory."""
    effort = plan.effort if plan.quick else Effort(least=9)
    for size in _QUICK if plan.quick else _SIZES:
        every, problems = _tried(size, plan.device)
        is_large = size.width > 64 or plan.quick
        peaks = {name: _peaks_of(plan, name, [size])[0] for name in every if is_large}
        for ours, theirs, against, slowest, largest in _CONTESTS:
            what = f"{_CALLS[ours]}, {size}"
            if problem := problems.get(theirs) or problems.get(ours):
                yield Row(what=what, against=against, note=problem)
                continue
            pair = {name: every[name] for name in (ours, theirs)}
            timings = measure(pair, plan.device, effort)
            yield timed(what, against, timings, ours=ours, theirs=theirs, limit=slowest)
            if peaks:
                yield memory.row(what, against, peaks[ours], peaks[theirs], largest)
        if peaks:
            yield _beyond_one_backward(plan, size, peaks["gram"])


def _beyond_one_backward(plan: Plan, size: Size, ours: Peak) -> Row:
    """Return the row against one backward pass, and K gradients of the largest parameter."""
    one = _peaks_of(plan, "backward", [size])[0]
    largest = max(param.nbytes for param in size.task(plan.device).params.values())
    theirs = Peak(one.total + size.count * largest, one.results)
    against = "one backward pass, and K times the largest gradient"
    return memory.row(f"gram, {size}", against, ours, theirs, 1.2)


def growth(plan: Plan) -> dict[str, dict[int, dict[str, float]]]:
    """Return the peaks of all sides in MB, as the losses grow in number, and the layers in width.

    By what grows, its number, and the side.
    """
    by_count = {count: replace(_LARGE, count=count) for count in (2, 4, 8)}
    by_width = {width: replace(_LARGE, width=width) for width in (256, 512, 1024)}
    axes = {"losses": by_count, "units in each of 8 layers": by_width}
    sizes = [size for axis in axes.values() for size in axis.values()]
    found = {name: iter(_peaks_of(plan, name, sizes)) for name in SIDES}
    return {
        noun: {
            count: {name: next(peaks).total / 1e6 for name, peaks in found.items()}
            for count in axis
        }
        for noun, axis in axes.items()
    }


def _tried(size: Size, device: torch.device) -> tuple[dict[str, Side], dict[str, str]]:
    """Return the sides, each of which has run once, and why others do not."""
    every: dict[str, Side] = {}
    problems: dict[str, str] = {}
    for name, make in SIDES.items():
        side, problem = peers.found(lambda make=make: _run_once(make(size, device)))  # type: ignore[misc]
        if side is None:
            problems[name] = problem
        else:
            every[name] = side
    return every, problems


def _run_once(side: Side) -> Side:
    side.run(side.build())
    return side


def _gram(size: Size, device: torch.device) -> Side:
    task = size.task(device)
    return Side(task.build, lambda losses: gradkit.gram(losses, task.params))


def _sets(size: Size, device: torch.device) -> Side:
    task = size.task(device)

    def run(losses: Any) -> Tensor:
        return gradkit.tree.gram(gradkit.per_loss_grads(losses, task.params))

    return Side(task.build, run)


def _autogram(size: Size, device: torch.device) -> Side:
    engine = import_module("torchjd.autogram").Engine
    trunk = models.mlp(size.width, size.depth).to(device)
    tops = nn.ModuleList(nn.Linear(size.width, 1) for _ in range(size.count)).to(device)
    gramian = engine(trunk, *tops, batch_dim=None)

    def build() -> Tensor:
        features = trunk(torch.randn(size.batch, size.width, device=device))
        return torch.stack([(top(features) - 1).square().mean() for top in tops])

    return Side(build, gramian.compute_gramian)


def _weights(size: Size, device: torch.device) -> Side:
    weighting = import_module("torchjd.aggregation").UPGradWeighting()
    task = size.task(device)

    def run(losses: Any) -> Any:
        return gradkit.value_and_grads(losses, task.params, weights=weighting)[1]

    return Side(task.build, run)


def _jac_to_grad(size: Size, device: torch.device) -> Side:
    autojac = import_module("torchjd.autojac")
    aggregator = import_module("torchjd.aggregation").UPGrad()
    task = size.task(device)
    params = list(task.params.values())

    def build() -> Any:
        for param in params:
            param.grad = None
        return task.build()

    def run(losses: Any) -> list[Tensor | None]:
        autojac.backward(losses, inputs=params)
        autojac.jac_to_grad(params, aggregator)
        return [param.grad for param in params]

    return Side(build, run)


def _backward(size: Size, device: torch.device) -> Side:
    task = size.task(device)
    params = list(task.params.values())

    def run(losses: Any) -> tuple[Tensor | None, ...]:
        ones = [torch.ones_like(loss) for loss in losses]
        return torch.autograd.grad(losses, params, ones, allow_unused=True)

    return Side(task.build, run)


SIDES: dict[str, Callable[[Size, torch.device], Side]] = {
    "gram": _gram,
    "sets": _sets,
    "autogram": _autogram,
    "weights": _weights,
    "jac_to_grad": _jac_to_grad,
    "backward": _backward,
}


def _peaks_of(plan: Plan, name: str, sizes: Sequence[Size]) -> list[Peak]:
    if plan.quick:
        return [_peak(name, size, plan.device) for size in sizes]
    here, plain = "benchmarks.streaming:peaks_here", list(map(asdict, sizes))
    found = fresh.call(here, name=name, sizes=plain, device=str(plan.device))
    return [Peak(**peak) for peak in found]


def peaks_here(name: str, sizes: list[dict[str, Any]], device: str) -> list[dict[str, int]]:
    """Return the peaks of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    return [asdict(_peak(name, Size(**size), torch.device(device))) for size in sizes]


def _peak(name: str, size: Size, device: torch.device) -> Peak:
    # Libraries set up memory of their own in the first call.
    return memory.peak(_run_once(SIDES[name](size, device)), device)
