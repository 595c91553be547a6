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
from benchmarks.harness import Effort, Side, Timing, measure
from benchmarks.memory import Peak
from benchmarks.models import Classifier
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_BATCH = 128
_MAX_NORM = 1.0
_GHOST, _LOOP = "Opacus ghost clipping", "autograd.grad in a loop"
Make = Callable[[Classifier], Side]
Cell = tuple[str, str]  # the name of a model, and a call
Tasks = dict[str, Classifier]
Figures = tuple[list[int], Peak]  # the nanoseconds of each round, and the peak


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each model and call the rows for time and peak memory, against each peer."""
    effort = plan.effort if plan.quick else Effort(least=5)
    few = effort if plan.quick else Effort(least=3, warmup=1)  # a loop is slow
    here = tasks(plan.device, quick=plan.quick)
    cells = [(name, call) for name in here for call in CALLS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus makes torch warn of its hooks
        ours = {cell: _result(here, cell, "gradkit") for cell in cells}  # before there are hooks
        yield from _against(
            plan, effort, _GHOST, {c: _problem(here, c, _GHOST, ours) for c in cells}
        )
        first = [(next(iter(here)), call) for call in CALLS]
        yield from _against(plan, few, _LOOP, {c: _problem(here, c, _LOOP, ours) for c in first})


def _against(plan: Plan, effort: Effort, way: str, problems: dict[Cell, str]) -> Iterator[Row]:
    limit = 1.2 if way == _GHOST else None
    for (name, call), problem in problems.items():
        what = f"{call}, {name}"
        if problem:
            yield Row(what=what, against=way, note=problem)
            continue
        sides = _compare(plan, effort, (name, call), way)
        timings = {side: Timing(tuple(taken)) for side, (taken, _) in sides.items()}
        yield timed(what, way, timings, theirs=way, limit=limit)
        yield memory.row(what, way, sides["gradkit"][1], sides[way][1], limit)


def tasks(device: torch.device, *, quick: bool) -> Tasks:
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


def _problem(here: Tasks, cell: Cell, way: str, ours: dict[Cell, list[Tensor]]) -> str:
    """Return why a way cannot be held against gradkit; "" if it can."""
    _, problem = peers.found(
        lambda: None, lambda: peers.close(ours[cell], _result(here, cell, way))
    )
    return problem


def _result(here: Tasks, cell: Cell, way: str) -> list[Tensor]:
    name, call = cell
    side = CALLS[call][way](here[name].copy(torch.float64))
    torch.manual_seed(0)
    result: Any = side.run(side.build())
    return list(result.values()) if isinstance(result, dict) else [result]


def _compare(plan: Plan, effort: Effort, cell: Cell, way: str) -> dict[str, Figures]:
    """Measure gradkit and another way in processes of their own.

    Opacus registers hooks, and in a process where there are hooks gradkit relies on no proof that
    samples are independent.
    """
    if plan.quick:
        sides = ("gradkit", way)
        return {side: figures(plan.device, effort, cell, side, quick=True) for side in sides}
    found: dict[str, Figures] = {}
    for side in ("gradkit", way):
        taken, peak = fresh.call(
            "benchmarks.clipping:figures_here",
            cell=cell,
            way=side,
            device=str(plan.device),
            effort=asdict(effort),
        )
        found[side] = taken, Peak(**peak)
    return found


def figures_here(
    cell: list[str], way: str, device: str, effort: dict[str, Any]
) -> tuple[list[int], dict[str, int]]:
    """Return the figures of one side as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    name, call = cell
    taken, peak = figures(torch.device(device), Effort(**effort), (name, call), way, quick=False)
    return taken, asdict(peak)


def figures(device: torch.device, effort: Effort, cell: Cell, way: str, *, quick: bool) -> Figures:
    """Return the nanoseconds that each call of one side took, and its peak."""
    name, call = cell
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        side = CALLS[call][way](tasks(device, quick=quick)[name])
        rounds = replace(effort, most=effort.least)  # as many of each side
        timing = measure({way: side}, device, rounds)[way]
        return list(timing.samples), memory.peak(side, device)
