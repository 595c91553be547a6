"""The functional calls under torch.compile, against themselves without, and torch.func with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.func import grad, grad_and_value, vmap

import gradkit
from benchmarks import compiled_steps, functions, models, samplers, samples
from benchmarks.harness import Side, measure
from benchmarks.models import Classifier, Function
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

# Two hundred params take a minute to compile.
_SIZES = {name: size for name, size in functions.SIZES.items() if not name.startswith("200")}


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to compile.

    Attributes:
        what: The call.
        against: That of torch.func.
        ours: What to compile.
        theirs: What to compile of torch.func.
        params: The first argument of both.
        build: Returns the others.
    """

    what: str
    against: str
    ours: Callable[..., object]
    theirs: Callable[..., object]
    params: Any
    build: Callable[[], tuple[Any, ...]]

    def side(self, call: Callable[..., object]) -> Side:
        """Return the side that makes a call."""
        return Side(self.build, lambda others: call(self.params, *others))


def rows(plan: Plan) -> Iterator[Row]:
    """Yield two rows for each call and size."""
    for subject in _subjects(plan):
        # What earlier rows compiled would count against torch's limit for one function.
        torch._dynamo.reset()
        ours, theirs = (_compiled(plan, call) for call in (subject.ours, subject.theirs))
        # In a quick run nothing is made into machine code, only traced.
        what = f"{subject.what}, compiled by {_backend(plan)}"
        yield _row(plan, subject, what, "itself, not compiled", (ours, subject.ours))
        yield _row(plan, subject, what, f"{subject.against}, compiled", (ours, theirs))
    yield from compiled_steps.rows(plan, partial(_compiled, plan))
    forces = _of_forces(plan)
    torch._dynamo.reset()
    calls = _compiled(plan, forces.ours), forces.theirs
    what = f"{forces.what}, compiled by {_backend(plan)}"
    yield _row(plan, forces, what, forces.against, calls)


def _backend(plan: Plan) -> str:
    return "eager" if plan.quick else "inductor"


def _compiled(plan: Plan, call: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(call, fullgraph=True, backend=_backend(plan))


def _row(
    plan: Plan,
    subject: Subject,
    what: str,
    against: str,
    calls: tuple[Callable[..., object], Callable[..., object]],
) -> Row:
    sides = {
        name: subject.side(call) for name, call in zip(("gradkit", "other"), calls, strict=True)
    }
    try:
        # The first round compiles, which is not timed: on one thread, for which code is made.
        timings = measure(sides, plan.device, plan.effort)
    except Exception as error:  # a machine without a compiler, say: the row says so
        problem = str(error).strip().partition("\n")[0]
        return Row(what=what, against=against, note=f"{type(error).__name__}: {problem}")
    return timed(what, against, timings, theirs="other", limit=None)


def _subjects(plan: Plan) -> Iterator[Subject]:
    for name, size in (functions.SMALL if plan.quick else _SIZES).items():
        yield _of_a_loss(name, models.layers(*size, plan.device))
    classifiers = samples.tasks(plan)
    first, *_, pooled = classifiers
    for name in (first,) if plan.quick else (first, pooled):
        yield _of_samples(name, classifiers[name])


def _of_a_loss(name: str, task: Function) -> Subject:
    return Subject(
        what=f"func.value_and_grads, {name}",
        against=functions.GRAD_AND_VALUE,
        ours=gradkit.func.value_and_grads(task.fn),
        theirs=grad_and_value(task.fn),
        params=task.params,
        build=lambda: (task.build(),),
    )


def _of_forces(plan: Plan) -> Subject:
    width, depth, batch = (4, 2, 3) if plan.quick else (32, 3, 16)
    task = models.layers(width, depth, batch, plan.device)
    by = functions.of_forces(task)
    return Subject(
        what="energies and forces, func",
        against=functions.BY_HAND,
        ours=lambda _, batch: by["cut"].run(batch),
        theirs=lambda _, batch: by["hand"].run(batch),
        params=task.params,
        build=lambda: (task.build(),),
    )


def _of_samples(name: str, task: Classifier) -> Subject:
    return Subject(
        what=f"per_sample_grads, {name}",
        against=samplers.VMAP,
        ours=gradkit.func.per_sample_grads(task.loss),
        theirs=vmap(grad(task.loss), in_dims=(None, 0, 0)),
        params=task.params,
        build=task.build,
    )
