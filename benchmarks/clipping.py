"""Norms of samples' gradients, and their clipped sum: against Opacus' ghosts, and a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gradkit
from benchmarks import fresh, memory, models, peers
from benchmarks.harness import Effort, Side, Timing, keep_heap, measure
from benchmarks.memory import Peak
from benchmarks.models import Classifier
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_BATCH = 128
_MAX_NORM = 1.0
_GHOST, _LOOP = "Opacus ghost clipping", "autograd.grad in a loop"
Make = Callable[[Classifier], Side]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each model and call the rows for time and for peak memory, against each peer."""
    effort = plan.effort if plan.quick else Effort(least=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus makes torch warn of its hooks
        for name, task in tasks(plan.device, quick=plan.quick).items():
            for call, ways in CALLS.items():
                yield from _against(plan, effort, name, task, call, ways)


def _against(
    plan: Plan, effort: Effort, name: str, task: Classifier, call: str, ways: dict[str, Make]
) -> Iterator[Row]:
    what = f"{call}, {name}"
    for way in (_GHOST, _LOOP):
        side, problem = peers.found(
            lambda make=ways[way]: make(task.copy()),  # type: ignore[misc]
            lambda make=ways[way]: _agree(task, ways["gradkit"], make),  # type: ignore[misc]
        )
        if side is None:
            yield Row(what=what, against=way, note=problem)
            continue
        few = effort if way == _GHOST else replace(effort, least=3, warmup=1)  # a loop is slow
        timings, peaks = _compare(plan, few, name, call, way)
        limit = 1.2 if way == _GHOST else None
        yield timed(what, way, timings, theirs=way, limit=limit)
        yield memory.row(what, way, peaks["gradkit"], peaks[way], limit)


def tasks(device: torch.device, *, quick: bool) -> dict[str, Classifier]:
    """Return the models, by name."""
    if quick:
        return {"MLP W4 D3 B3": models.dense_classifier(4, 3, 3, device)}
    cnn = models.convolutional_classifier(16, (3, 32, 32), _BATCH, device, pooled=True)
    return {
        f"MLP W512 D3 B{_BATCH}": models.dense_classifier(512, 3, _BATCH, device),
        f"CNN pooled C16 3x32x32 B{_BATCH}": cnn,
    }


def _losses(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1], reduction="none")


def _params(task: Classifier) -> dict[str, Tensor]:
    return dict(task.module.named_parameters())


def _norms(task: Classifier) -> Side:
    return Side(
        task.build, lambda batch: gradkit.per_sample_norms(_losses(task.module, batch), task.module)
    )


def _sum(task: Classifier) -> Side:
    def run(batch: Any) -> Any:
        return gradkit.clipped_sum(_losses(task.module, batch), task.module, _MAX_NORM)

    return Side(task.build, run)


def _grads_of_each(task: Classifier, batch: tuple[Tensor, Tensor]) -> Iterator[list[Tensor]]:
    losses = _losses(task.module, batch)
    params = list(task.module.parameters())
    for loss in losses:
        yield list(torch.autograd.grad(loss, params, retain_graph=True))


def _norm(grads: list[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return norm


def _looped_norms(task: Classifier) -> Side:
    def run(batch: Any) -> Tensor:
        return torch.stack([_norm(grads) for grads in _grads_of_each(task, batch)])

    return Side(task.build, run)


def _looped_sum(task: Classifier) -> Side:
    def run(batch: Any) -> dict[str, Tensor]:
        params = _params(task)
        total = [torch.zeros_like(param) for param in params.values()]
        for grads in _grads_of_each(task, batch):
            factor = (_MAX_NORM / (_norm(grads) + 1e-6)).clamp(max=1.0)
            torch._foreach_add_(total, torch._foreach_mul(grads, factor))
        return dict(zip(params, total, strict=True))

    return Side(task.build, run)


def _ghosts(task: Classifier) -> tuple[Any, Any]:
    fast = import_module("opacus.grad_sample").GradSampleModuleFastGradientClipping
    module = fast(task.module, max_grad_norm=_MAX_NORM, loss_reduction="sum")
    return module, torch.optim.SGD(task.module.parameters(), lr=0.1)


def _ghost_norms(task: Classifier) -> Side:
    module, optimizer = _ghosts(task)

    def run(batch: Any) -> Tensor:
        optimizer.zero_grad()
        _losses(module, batch).sum().backward()  # type: ignore[no-untyped-call]
        norms: Tensor = module.get_norm_sample()
        return norms

    return Side(task.build, run)


def _ghost_sum(task: Classifier) -> Side:
    module, optimizer = _ghosts(task)
    loss_class = import_module("opacus.utils.fast_gradient_clipping_utils")
    clipped = loss_class.DPTensorFastGradientClipping

    def run(batch: Any) -> dict[str, Tensor | None]:
        optimizer.zero_grad()
        module.enable_hooks()
        clipped(module, optimizer, _losses(module, batch), "sum").backward()
        return {name: param.grad for name, param in _params(task).items()}

    return Side(task.build, run)


CALLS: dict[str, dict[str, Make]] = {
    "per_sample_norms": {"gradkit": _norms, _GHOST: _ghost_norms, _LOOP: _looped_norms},
    "clipped_sum": {"gradkit": _sum, _GHOST: _ghost_sum, _LOOP: _looped_sum},
}


def _agree(task: Classifier, ours: Make, theirs: Make) -> bool:
    found: list[list[Tensor]] = []
    for make in (ours, theirs):
        side = make(task.copy(torch.float64))
        torch.manual_seed(0)
        result: Any = side.run(side.build())
        found.append(list(result.values()) if isinstance(result, dict) else [result])
    return peers.close(found[0], found[1])


def _compare(
    plan: Plan, effort: Effort, name: str, call: str, way: str
) -> tuple[dict[str, Timing], dict[str, Peak]]:
    """Measure gradkit and another way in processes of their own, which take turns.

    Opacus registers hooks, and in a process where there are hooks gradkit relies on no proof that
    samples are independent.
    """
    samples: dict[str, list[int]] = {"gradkit": [], way: []}
    peaks: dict[str, Peak] = {}
    for one in ("gradkit", way) if plan.quick else ("gradkit", way, way, "gradkit"):
        if plan.quick:
            taken, peak = figures(plan.device, effort, name, call, one, quick=True)
        else:
            taken, values = fresh.call(
                "benchmarks.clipping:figures_here",
                name=name,
                call=call,
                way=one,
                device=str(plan.device),
                effort=asdict(effort),
            )
            peak = Peak(**values)
        samples[one] += taken
        peaks[one] = peak
    return {one: Timing(tuple(taken)) for one, taken in samples.items()}, peaks


def figures_here(
    name: str, call: str, way: str, device: str, effort: dict[str, Any]
) -> tuple[list[int], dict[str, int]]:
    """Return the figures of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    keep_heap()
    taken, peak = figures(torch.device(device), Effort(**effort), name, call, way, quick=False)
    return taken, asdict(peak)


def figures(
    device: torch.device, effort: Effort, name: str, call: str, way: str, *, quick: bool
) -> tuple[list[int], Peak]:
    """Return the nanoseconds that each call of one side took, and its peak."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = CALLS[call][way](tasks(device, quick=quick)[name])
        rounds = replace(effort, most=effort.least)  # as many of each side
        timing = measure({way: side}, device, rounds)[way]
        return list(timing.samples), memory.peak(side, device)
