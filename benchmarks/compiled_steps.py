"""A compiled training step: one graph, or compiled gradients and step_, against the usual loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import gradkit
from benchmarks import training
from benchmarks.harness import Side, measure
from benchmarks.nets import NETS, Net
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

_NAMES = "10 linear layers 64 wide", "encoder, 4 layers 128 wide"
_META: dict[str, Callable[[], gradkit.meta.Optimizer]] = {
    "SGD": lambda: gradkit.meta.sgd(lr=1e-9, momentum=0.9),
    "Adam": lambda: gradkit.meta.adam(lr=1e-9),
}
_WAYS = {
    "one graph": "one graph",
    "gradients": "compiled func.value_and_grads and step_",
    "model": "a compiled model in the usual loop",
}
_FUSED = "the loop with fused=True"
# What a prototype of one graph took, over the loop and over the loop with fused=True.
_LIMITS = {
    (_NAMES[0], "Adam", training.LOOP): 0.55,
    (_NAMES[0], "Adam", _FUSED): 0.85,
    (_NAMES[1], "Adam", training.LOOP): 0.85,
}


def rows(plan: Plan, compiled: Callable[..., Callable[..., Any]]) -> Iterator[Row]:
    """Yield the rows of each way, network and optimizer; `compiled` compiles a function."""
    for name in list(NETS)[:1] if plan.quick else _NAMES:
        for optimizer in _META:
            torch._dynamo.reset()
            try:
                timings = measure(
                    _sides(NETS[name], optimizer, plan, compiled), plan.device, plan.effort
                )
            except Exception as error:  # a machine without a compiler, say: the row says so
                problem = str(error).strip().partition("\n")[0]
                note = f"{type(error).__name__}: {problem}"
                yield Row(what=f"{_WAYS['one graph']}, {name}", against=training.LOOP, note=note)
                continue
            for side, way in _WAYS.items():
                for theirs, against in {"raw": training.LOOP, "fused": _FUSED}.items():
                    limit = _LIMITS.get((name, optimizer, against)) if side == "one graph" else None
                    what = f"{way}, {optimizer}, {name}"
                    yield timed(what, against, timings, ours=side, theirs=theirs, limit=limit)


def _sides(
    net: Net, optimizer: str, plan: Plan, compiled: Callable[..., Callable[..., Any]]
) -> dict[str, Side]:
    def loop(**options: bool) -> Side:
        model = net.make().to(plan.device)
        return _loop(net, model, model, optimizer, plan, **options)

    model = net.make().to(plan.device)
    return {
        "one graph": _one_graph(net, optimizer, plan, compiled),
        "gradients": _gradients(net, optimizer, plan, compiled),
        "model": _loop(net, model, compiled(model), optimizer, plan),
        "raw": loop(),
        "fused": loop(fused=True),
    }


def _loop(
    net: Net, model: nn.Module, called: Any, optimizer: str, plan: Plan, **options: bool
) -> Side:
    steps = training.OPTIMIZERS[optimizer](model.parameters(), **options)

    def run(batch: Tensor) -> None:
        steps.zero_grad()
        net.loss(called, batch).backward()  # type: ignore[no-untyped-call]
        steps.step()

    return Side(lambda: net.batch(plan.device), run)


def _one_graph(
    net: Net, optimizer: str, plan: Plan, compiled: Callable[..., Callable[..., Any]]
) -> Side:
    opt = _META[optimizer]()
    call, params, buffers = gradkit.func.make_functional(net.make().to(plan.device))
    carry = gradkit.tree.map(Tensor.detach, params), opt.init(params)

    @compiled
    def step(params: Any, state: Any, batch: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return call(params, buffers, batch)[0].square().mean()  # type: ignore[no-any-return]

        value, grads = gradkit.func.value_and_grads(loss, create_graph=False)(params)
        return value, opt.step(params, grads, state)

    def run(batch: Tensor) -> None:
        nonlocal carry
        _, carry = step(*carry, batch)

    return Side(lambda: net.batch(plan.device), run)


def _gradients(
    net: Net, optimizer: str, plan: Plan, compiled: Callable[..., Callable[..., Any]]
) -> Side:
    model = net.make().to(plan.device)
    call, params, buffers = gradkit.func.make_functional(model)
    steps = training.OPTIMIZERS[optimizer](model.parameters())
    weights = {name: param.detach() for name, param in params.items()}  # which the step writes on

    @compiled
    def grads_of(params: Any, batch: Tensor) -> Any:
        def loss(params: Any) -> Tensor:
            return call(params, buffers, batch)[0].square().mean()  # type: ignore[no-any-return]

        return gradkit.func.value_and_grads(loss, create_graph=False)(params)

    def run(batch: Tensor) -> None:
        gradkit.step_(steps, model, grads_of(weights, batch)[1])

    return Side(lambda: net.batch(plan.device), run)
