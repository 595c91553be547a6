"""Calls that must guard their results: among hooks, custom Functions and compiled modules.

A hook or a Function costs every later call of its process: each situation has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import fresh, heads, models, values
from benchmarks.harness import Side, Timing, measure
from benchmarks.heads import Size
from benchmarks.models import Task
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_HEADS = Size(64, 3, 32, 8)
# Width, depth, batch: 200 tensors.
_DEEP = (16, 100, 16)


@dataclass(frozen=True, slots=True)
class Call:
    """A call and what is about when it is made.

    Attributes:
        against: The other side, in words.
        arrange: Makes the sides, for a small task or the one that is measured, and leaves behind
            what is about.
        limit: The target: the largest ratio.
    """

    against: str
    arrange: Callable[[torch.device, bool], dict[str, Side]]
    limit: float


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each situation."""
    for what, call in CALLS.items():
        yield _row(plan, what, call)


def _row(plan: Plan, what: str, call: Call) -> Row:
    try:
        samples = _samples(plan, what) if plan.quick else _in_a_fresh_process(plan, what)
    except RuntimeError as error:  # a machine without a compiler, say: the row says so
        return Row(what=what, against=call.against, note=str(error).strip().splitlines()[-1])
    timings = {side: Timing(tuple(taken)) for side, taken in samples.items()}
    return timed(what, call.against, timings, theirs="raw", limit=call.limit)


def _in_a_fresh_process(plan: Plan, what: str) -> Any:
    return fresh.call("benchmarks.guarded:compare_here", what=what, device=str(plan.device))


def compare_here(what: str, device: str) -> dict[str, list[int]]:
    """Return the samples of both sides as plain values; what a fresh process runs."""
    torch.manual_seed(0)
    return _samples(Plan(torch.device(device)), what)


def _samples(plan: Plan, what: str) -> dict[str, list[int]]:
    torch.set_num_threads(1)  # also while a module is compiled: for which code is made
    sides = CALLS[what].arrange(plan.device, plan.quick)
    timings = measure(sides, plan.device, plan.effort)
    return {side: list(timing.samples) for side, timing in timings.items()}


def _deep(device: torch.device, small: bool) -> Task:
    return models.deep(*((4, 2, 3) if small else _DEEP), device)


def _plain(device: torch.device, small: bool) -> dict[str, Side]:
    return values.sides(_deep(device, small))


class _Same(torch.autograd.Function):
    """The identity, as a Function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the cotangent."""
        return grads[0]


def _with_function(device: torch.device, small: bool) -> dict[str, Side]:
    task = _deep(device, small)

    def build() -> Tensor:
        loss: Tensor = _Same.apply(task.build())  # type: ignore[no-untyped-call]
        return loss

    return values.sides(replace(task, build=build))


def _with_hook_elsewhere(device: torch.device, small: bool) -> dict[str, Side]:
    _hook_elsewhere()
    return _plain(device, small)


def _hook_elsewhere() -> None:
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)


def _with_tensor_hook(device: torch.device, small: bool) -> dict[str, Side]:
    task = _deep(device, small)

    def build() -> Tensor:
        loss: Tensor = task.build() * 1.0
        loss.register_hook(lambda grad: grad * 1.0)  # type: ignore[no-untyped-call]
        return loss * 1.0

    return values.sides(replace(task, build=build))


def _compiled(device: torch.device, small: bool) -> dict[str, Side]:
    width, layers, batch = (4, 2, 3) if small else (64, 10, 32)
    model = models.mlp(width, layers).to(device)
    # In a quick run nothing is made into machine code, only traced.
    module = torch.compile(model, backend="aot_eager" if small else "inductor")

    def build() -> Tensor:
        loss: Tensor = module(torch.randn(batch, width, device=device)).square().mean()
        return loss

    return values.sides(Task(dict(model.named_parameters()), build))


def _heads(device: torch.device, small: bool) -> dict[str, Side]:
    return heads.sides((Size(4, 2, 3, 2) if small else _HEADS).task(device))


def _heads_with_hook(device: torch.device, small: bool) -> dict[str, Side]:
    _hook_elsewhere()
    return _heads(device, small)


_VALUES, _PER_LOSS = "value_and_grads, 200 params", f"per_loss_grads, {_HEADS}"
CALLS = {
    f"{_VALUES}, a custom Function in the graph": Call(values.RAW, _with_function, 1.12),
    f"{_VALUES}, a forward hook elsewhere": Call(values.RAW, _with_hook_elsewhere, 1.08),
    f"{_VALUES}, a tensor hook in the graph": Call(values.RAW, _with_tensor_hook, 1.12),
    "value_and_grads, 20 params of a compiled module": Call(values.RAW, _compiled, 1.10),
    f"{_PER_LOSS}, no hook or Function": Call(heads.LOOP, _heads, 1.12),
    f"{_PER_LOSS}, a forward hook elsewhere": Call(heads.LOOP, _heads_with_hook, 1.12),
}
