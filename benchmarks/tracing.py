"""How long torch.compile takes to trace a call, and how many guards it makes, beside torch.func.

Backend "eager" runs what dynamo has traced as it is: nothing but the tracing is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import gradkit
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_RUNS = 3
_DEPTHS = (2, 10)
Call = Callable[..., object]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield two rows for each call and depth."""
    for depth in _DEPTHS[:1] if plan.quick else _DEPTHS:
        params = {f"layer {i}": torch.randn(4, 4, device=plan.device) for i in range(depth)}
        args = params, torch.randn(8, 4, device=plan.device)
        for name, (ours, theirs) in _calls(params).items():
            runs = [[_traced(call, args) for call in (ours, theirs)] for _ in range(_runs(plan))]
            (ms, guards), (their_ms, their_guards) = map(min, zip(*runs, strict=True))
            what = f"tracing {name}, {depth} layers"
            yield _row(what, "ms", (ms, their_ms), Want(1.3), ms / their_ms)
            yield _row(what, "guards", (guards, their_guards), Want(20, "guards"), None)


def _runs(plan: Plan) -> int:
    return 1 if plan.quick else _RUNS


def _row(what: str, unit: str, pair: tuple[float, float], want: Want, ratio: float | None) -> Row:
    ours, theirs = pair
    figure = ours - theirs if ratio is None else ratio
    facts: Any = {"unit": unit, "ratio": ratio, "figure": figure, "want": want}
    note = "those that gradkit adds" if ratio is None else "the best of three first calls"
    return Row(what=what, against="torch.func", ours=ours, theirs=theirs, note=note, **facts)


def _traced(call: Call, args: tuple[Any, ...]) -> tuple[float, int]:
    """Return the milliseconds of a first compiled call, and the number of guards."""
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    start = time.thread_time()
    compiled(*args)
    taken = 1e3 * (time.thread_time() - start)
    return taken, len(torch._dynamo.explain(call)(*args).out_guards)


def fn(params: Any, batch: Tensor) -> Tensor:
    """Return the loss that is differentiated."""
    for weight in params.values():
        batch = (batch @ weight).tanh()
    return batch.square().mean()


def _of_one(params: Any, sample: Tensor) -> Tensor:
    return fn(params, sample[None])


def _calls(params: dict[str, Tensor]) -> dict[str, tuple[Call, Call]]:
    """Return gradkit's call and torch.func's, by name."""
    func: Any = gradkit.func
    along = {name: torch.ones_like(x) for name, x in params.items()}

    def of(call: Callable[[Call], object]) -> Call:
        """Return a function of the arguments that calls another with the loss of a batch."""
        return lambda _, batch: call(lambda p: fn(p, batch))

    def squares(slopes: Any) -> Call:
        return lambda *args: sum(x.square().sum() for x in slopes(*args).values())

    def ours_at(params: Any, batch: Tensor) -> object:
        return func.value_and_grads(fn)(params, batch)[1]

    one = torch.ones((), device=next(iter(params.values())).device)
    return {
        "value_and_grads": (func.value_and_grads(fn), grad_and_value(fn)),
        "nested": (func.value_and_grads(squares(ours_at)), grad_and_value(squares(grad(fn)))),
        "per_sample_grads": (
            func.per_sample_grads(_of_one),
            vmap(grad(_of_one), in_dims=(None, 0)),
        ),
        "hvp": (
            of(lambda loss: func.hvp(loss, params, along)),
            of(lambda loss: jvp(grad(loss), (params,), (along,))),
        ),
        "jvp": (
            of(lambda loss: func.jvp(loss, params, along)),
            of(lambda loss: jvp(loss, (params,), (along,))),
        ),
        "vjp": (
            of(lambda loss: func.vjp(loss, params)[1](one)),
            of(lambda loss: vjp(loss, params)[1](one)),
        ),
    }
