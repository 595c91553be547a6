"""The meta-gradient over a batch of tasks, against a Python loop over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

import gradkit
from benchmarks import peers
from benchmarks.harness import Side, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

LOOP, FUNC_LOOP = "a create_graph loop for each task", "torch.func.grad for each task"
VMAP = "torch.func.vmap(grad)"
_STEPS, _RATE, _SHOTS = 5, 0.01, 10
Layers: TypeAlias = list[dict[str, Tensor]]
Batch: TypeAlias = tuple[Tensor, Tensor]
Task: TypeAlias = tuple[Batch, Batch]  # what is adapted to, and what is asked then


@dataclass(frozen=True, slots=True)
class Sines:
    """The sine regression of Finn et al. 2017, 10-shot.

    Attributes:
        width: Of the two hidden layers.
        count: How many tasks.
        device: Where.
        dtype: Of everything.
    """

    width: int
    count: int
    device: torch.device
    dtype: torch.dtype = torch.float32

    def params(self) -> Layers:
        """Return the layers of a network."""
        sizes = ((1, self.width), (self.width, self.width), (self.width, 1))
        linear = [nn.Linear(*size, device=self.device, dtype=self.dtype) for size in sizes]
        return [{"weight": layer.weight, "bias": layer.bias} for layer in linear]

    def build(self) -> Task:
        """Return fresh tasks, stacked."""
        amplitude, phase = torch.rand(2, self.count, 1, 1, device=self.device, dtype=self.dtype)
        places = torch.rand(2, self.count, _SHOTS, 1, device=self.device, dtype=self.dtype)
        support, query = 10 * places - 5

        def wave(x: Tensor) -> Tensor:
            height: Tensor = (0.1 + 4.9 * amplitude) * torch.sin(x - torch.pi * phase)
            return height

        return (support, wave(support)), (query, wave(query))


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each of the other ways."""
    task = Sines(4, 3, plan.device) if plan.quick else Sines(40, 25, plan.device)
    net = f"MLP 1-{task.width}-{task.width}-1"
    what = f"meta.mean_value_and_grads, {task.count} tasks, {net}, T{_STEPS}"
    _, problem = peers.found(lambda: None, lambda: agree(task))
    every = sides(task)
    for against, limit in ((LOOP, 1 / 6), (FUNC_LOOP, None), (VMAP, None)):
        if problem:
            yield Row(what=what, against=against, note=problem)
            continue
        pair = {name: every[name] for name in ("gradkit", against)}
        timings = measure(pair, plan.device, plan.effort)
        yield timed(what, against, timings, theirs=against, limit=limit)


def sides(task: Sines) -> dict[str, Side]:
    """Return all ways, for one network."""
    params = task.params()
    apart = [{name: leaf.detach() for name, leaf in layer.items()} for layer in params]
    leaves = _flat(params)
    opt = gradkit.meta.sgd(lr=_RATE)
    in_func = grad(_func_loss)

    def inner(params: Layers, _: object, batch: Batch) -> Tensor:
        return _loss(params, batch)

    def meta_loss(params: Layers, of_task: Task) -> Tensor:
        support, query = of_task
        adapted = gradkit.meta.unroll(inner, params, [support] * _STEPS, opt)
        return _loss(adapted.params, query)

    def ours(every: Task) -> list[Tensor]:
        mean = gradkit.meta.mean_value_and_grads
        return _flat(mean(meta_loss, params, every, create_graph=False)[1])

    def loop(every: Task) -> list[Tensor]:
        losses = [_plain_loss(params, one) for one in _apart(every)]
        return list(torch.autograd.grad(torch.stack(losses).mean(), leaves))

    def func_loop(every: Task) -> list[Tensor]:
        grads = [_flat(in_func(apart, one)) for one in _apart(every)]
        return [torch.stack(some).mean(0) for some in zip(*grads, strict=True)]

    def vmapped(every: Task) -> list[Tensor]:
        return [some.mean(0) for some in _flat(vmap(in_func, in_dims=(None, 0))(apart, every))]

    return {
        name: Side(task.build, run)
        for name, run in {"gradkit": ours, LOOP: loop, FUNC_LOOP: func_loop, VMAP: vmapped}.items()
    }


def _flat(layers: Layers) -> list[Tensor]:
    return [leaf for layer in layers for leaf in layer.values()]


def _apart(every: Task) -> Iterator[Task]:
    parts = [part.unbind() for batch in every for part in batch]
    for a, b, c, d in zip(*parts, strict=True):
        yield (a, b), (c, d)


def _plain_loss(params: Layers, of_task: Task) -> Tensor:
    support, query = of_task
    for _ in range(_STEPS):
        grads = torch.autograd.grad(_loss(params, support), _flat(params), create_graph=True)
        params = _moved(params, iter(grads))
    return _loss(params, query)


def _func_loss(params: Layers, of_task: Task) -> Tensor:
    support, query = of_task
    for _ in range(_STEPS):
        params = _moved(params, iter(_flat(grad(_loss)(params, support))))
    return _loss(params, query)


def _moved(params: Layers, grads: Iterator[Tensor]) -> Layers:
    return [{name: x - _RATE * next(grads) for name, x in layer.items()} for layer in params]


def _loss(params: Layers, batch: Batch) -> Tensor:
    value, target = batch
    *hidden, last = params
    for layer in hidden:
        value = functional.linear(value, layer["weight"], layer["bias"]).relu()
    return functional.mse_loss(functional.linear(value, last["weight"], last["bias"]), target)


def _results(side: Side, every: Task) -> list[Tensor]:
    results: Any = side.run(every)
    return list(results)


def agree(task: Sines) -> bool:
    """Return whether all ways give the same meta-gradient in double precision."""
    each = sides(replace(task, dtype=torch.float64))
    every = each["gradkit"].build()
    ours, *others = (_results(side, every) for side in each.values())
    return all(peers.close(ours, other) for other in others)
