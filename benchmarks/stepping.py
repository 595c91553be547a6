"""The .grad workflow: backward_ against .backward(), and a whole step against the usual loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import gradkit
from benchmarks import fresh, memory, models
from benchmarks.harness import Side, measure
from benchmarks.memory import Peak
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed

BACKWARD, LOOP = ".backward()", "zero_grad, backward, step"
# Two hundred small tensors, and twenty megabytes of large ones.
_IN_TRAINING = "200 params, 16 wide"  # a step on these is a row of `training`
SIZES = {_IN_TRAINING: (16, 100, 16), "20 MB of params, 1024 wide": (1024, 5, 64)}
SMALL = {"8 params, 4 wide": (4, 4, 2)}
_KINDS, _WAYS = ("backward", "step"), ("gradkit", "raw")
Shape: TypeAlias = tuple[int, int, int]  # width, depth, batch
Way: TypeAlias = tuple[str, str, Shape]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows for both, time and peak memory."""
    sizes = SMALL if plan.quick else SIZES
    for name, size in sizes.items():
        for what, against, make, limit in (
            ("backward_", BACKWARD, backward_sides, 1.02),
            ("value_and_grads and step_", LOOP, step_sides, 1.03),
        ):
            if make is step_sides and name == _IN_TRAINING:
                continue
            timings = measure(make(_task(size, plan.device)), plan.device, plan.effort)
            yield timed(f"{what}, {name}", against, timings, theirs="raw", limit=limit)
    every = _peaks(plan, sizes.values())
    for name, size in sizes.items():
        yield from _memory(name, size, every)


def backward_sides(task: Task) -> dict[str, Side]:
    """Return the ways to accumulate into `.grad` once more."""
    return {
        "gradkit": Side(task.build, gradkit.backward_),
        "raw": Side(task.build, lambda loss: loss.backward()),
    }


def step_sides(task: Task) -> dict[str, Side]:
    """Return the ways to take a step of SGD with momentum, each with weights of its own."""
    params = list(task.params.values())
    optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9)

    def ours(loss: Tensor) -> None:
        _, grads = gradkit.value_and_grads(loss, params)
        gradkit.step_(optimizer, params, grads)

    def raw(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return {"gradkit": Side(_from_clean(task, params), ours), "raw": Side(task.build, raw)}


def _from_clean(task: Task, params: list[Tensor]) -> Callable[[], Tensor]:
    def build() -> Tensor:
        for param in params:
            param.grad = None  # the other side leaves its own there
        loss: Tensor = task.build()
        return loss

    return build


def _memory(name: str, size: Shape, every: Mapping[Way, Peak]) -> Iterator[Row]:
    width, depth, _ = size
    one_set = sum(p.numel() * 4 for p in models.mlp(width, depth).parameters()) / 1e6
    for what, against, kind in (
        ("backward_", BACKWARD, "backward"),
        ("value_and_grads and step_", LOOP, "step"),
    ):
        ours, theirs = (every[kind, way, size] for way in _WAYS)
        allowed = theirs.total + (0 if kind == "backward" else one_set * 1e6)
        ratio = ours.total / theirs.total
        yield Row(
            what=f"{what}, peak memory, {name}",
            against=against,
            ours=ours.total / 1e6,
            theirs=theirs.total / 1e6,
            unit="MB",
            ratio=ratio,
            figure=ratio,
            want=Want(allowed / theirs.total * (1 + _SLACK)),
            note="" if kind == "backward" else f"one set of gradients is {one_set:.1f} MB",
            details={"gradkit": asdict(ours), "raw": asdict(theirs)},
        )


# Copies of the losses' values, of some bytes each.
_SLACK = 1e-3


def _peaks(plan: Plan, sizes: Collection[Shape]) -> dict[Way, Peak]:
    every = [(kind, way, size) for kind in _KINDS for way in _WAYS for size in sizes]
    if plan.quick:
        return {one: memory.peak(_sides(*one, plan.device), plan.device) for one in every}
    found = fresh.call("benchmarks.stepping:peaks_here", every=every, device=str(plan.device))
    return {one: Peak(**peak) for one, peak in zip(every, found, strict=True)}


def peaks_here(every: list[Any], device: str) -> list[dict[str, int]]:
    """Return the peaks of calls as plain values; what a fresh process runs."""
    torch.set_num_threads(1)
    place = torch.device(device)
    sides = [_sides(kind, way, (size[0], size[1], size[2]), place) for kind, way, size in every]
    return [asdict(_warm_peak(side, place)) for side in sides]


def _warm_peak(side: Side, device: torch.device) -> Peak:
    side.run(side.build())  # the optimizer's state is there from the first step on
    return memory.peak(side, device)


def _sides(kind: str, way: str, size: Shape, device: torch.device) -> Side:
    make = backward_sides if kind == "backward" else step_sides
    return make(_task(size, device))[way]


def _task(size: Shape, device: torch.device) -> Task:
    width, depth, batch = size
    task = models.deep(width, depth, batch, device)
    assert all(isinstance(param, nn.Parameter) for param in task.params.values())
    return task
