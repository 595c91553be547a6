"""The loss and gradient of a function, against torch.func, and the engine called by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, linearize, vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

import gradkit
from benchmarks import models
from benchmarks.harness import Side, measure
from benchmarks.models import Function
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

GRAD_AND_VALUE = "torch.func.grad_and_value"
BY_HAND = "leaves, autograd.grad"
# Width, depth, samples; and the targets over hand: with a graph where one is needed, and without.
SIZES = {
    "5 layers, 16 wide": (16, 5, 16),
    "10 layers, 64 wide": (64, 10, 32),
    "200 params, 16 wide": (16, 100, 16),
    "6 layers, 256 wide": (256, 6, 64),
}
_LIMITS = {
    "5 layers, 16 wide": (1.65, 1.45),
    "10 layers, 64 wide": (1.50, 1.30),
    "200 params, 16 wide": (1.35, 1.20),
    "6 layers, 256 wide": (1.15, 1.10),
}
PRODUCTS_OF = {name: SIZES[name] for name in ("5 layers, 16 wide", "6 layers, 256 wide")}
_PRODUCTS = ("vjp", "linearize", "hvp by reverse", "hvp")
SMALL = {"2 layers, 4 wide": (4, 2, 3)}
_LOSSES = 4
_Run = Callable[[Any, Tensor], Any]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows of each size, of a function and of a module, and those of other losses."""
    for name, size in (SMALL if plan.quick else SIZES).items():
        task = models.layers(*size, plan.device)
        timings = measure(sides(task), plan.device, plan.effort)
        yield timed(
            f"func.value_and_grads, {name}", GRAD_AND_VALUE, timings, theirs="raw", limit=1.10
        )
        limits: Any = _LIMITS.get(name, (None, None))
        for what, some in ((name, task), (f"make_functional, {name}", _as_module(*size, plan))):
            timings = measure(_over_hand(some), plan.device, plan.effort)
            for ours, limit in zip(("gradkit", "cut"), limits, strict=True):
                suffix = ", create_graph=False" if ours == "cut" else ""
                call = f"func.value_and_grads over hand, {what}{suffix}"
                yield timed(call, BY_HAND, timings, ours=ours, theirs="hand", limit=limit)
            call = f"torch.func.grad_and_value over hand, {what}"
            yield timed(call, BY_HAND, timings, ours="raw", theirs="hand", limit=None)
    width, depth, batch = (4, 2, 3) if plan.quick else (32, 3, 16)
    task = models.layers(width, depth, batch, plan.device)
    timings = measure(of_forces(task), plan.device, plan.effort)
    for ours, limit in (("gradkit", 1.7), ("cut", 1.5), ("raw", None)):
        what = {"gradkit": "func", "cut": "func, create_graph=False", "raw": "torch.func"}[ours]
        call = f"energies and forces over hand, {what}"
        yield timed(call, BY_HAND, timings, ours=ours, theirs="hand", limit=limit)
    for name, size in (SMALL if plan.quick else PRODUCTS_OF).items():
        task = models.layers(*size, plan.device)
        for product in _PRODUCTS:
            timings = measure(_products(task, product), plan.device, plan.effort)
            for ours, what in (("gradkit", "func"), ("raw", "torch.func")):
                call = f"{product} over hand, {name}, {what}"
                yield timed(call, BY_HAND, timings, ours=ours, theirs="hand", limit=None)
    task = models.layers(4 if plan.quick else 16, 2 if plan.quick else 5, 16, plan.device)
    timings = measure(_of_losses(task), plan.device, plan.effort)
    for ours in ("gradkit", "eager", "raw"):
        what = {"gradkit": "func", "eager": "eager", "raw": "jacrev"}[ours]
        call = f"{_LOSSES} losses over hand, {what}"
        yield timed(call, BY_HAND, timings, ours=ours, theirs="hand", limit=None)


def sides(task: Function) -> dict[str, Side]:
    """Return gradkit's way and torch's."""
    ours, raw = gradkit.func.value_and_grads(task.fn), grad_and_value(task.fn)

    def run_ours(batch: Tensor) -> object:
        return ours(task.params, batch)

    def run_raw(batch: Tensor) -> object:
        return raw(task.params, batch)

    return {"gradkit": Side(task.build, run_ours), "raw": Side(task.build, run_raw)}


def _as_module(width: int, depth: int, batch: int, plan: Plan) -> Function:
    """Return the same layers as a module, whose parameters are given."""
    layers = [torch.nn.Linear(width, width) for _ in range(depth)]
    module = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.Tanh())))
    call, params, buffers = gradkit.func.make_functional(module.to(plan.device))

    def fn(params: Any, value: Tensor) -> Tensor:
        out: Tensor = call(params, buffers, value)[0]
        return out.square().mean()

    def by_torch(params: Any, value: Tensor) -> Tensor:
        out: Tensor = functional_call(module, params, (value,))
        return out.square().mean()

    vars(fn)["by_torch"] = by_torch
    given: Any = {name: param.detach() for name, param in params.items()}
    return Function(fn, given, lambda: torch.randn(batch, width, device=plan.device))


def _leaves(params: Any) -> tuple[Any, list[Tensor]]:
    leaves, spec = tree_flatten(params)
    leaves = [x.detach().requires_grad_() for x in leaves]
    return tree_unflatten(leaves, spec), leaves


def _all_sides(task: Function, hand: _Run, raw: _Run, fn: _Run) -> dict[str, Side]:
    calls: dict[str, _Run] = {
        "hand": hand,
        "gradkit": gradkit.func.value_and_grads(fn),
        "cut": gradkit.func.value_and_grads(fn, create_graph=False),
        "raw": raw,
    }
    return {name: Side(task.build, partial(call, task.params)) for name, call in calls.items()}


def _over_hand(task: Function) -> dict[str, Side]:
    """Return the ways to one gradient."""
    by_torch = vars(task.fn).get("by_torch", task.fn)

    def hand(params: Any, batch: Tensor) -> object:
        tree, leaves = _leaves(params)
        loss = by_torch(tree, batch)
        return loss.detach(), torch.autograd.grad(loss, leaves)

    return _all_sides(task, hand, grad_and_value(by_torch), task.fn)


def of_forces(task: Function) -> dict[str, Side]:
    """Return the ways to the gradient of a loss of energies and forces."""

    def fit(energy: Tensor, slope: Tensor) -> Tensor:
        return energy.square() + (slope - 1).square().sum()

    def energy(batch: Tensor, params: Any) -> Tensor:
        return task.fn(params, batch)

    def fn(params: Any, batch: Tensor) -> Tensor:
        return fit(*gradkit.func.value_and_grads(energy)(batch, params))

    def by_torch(params: Any, batch: Tensor) -> Tensor:
        slope, value = grad_and_value(energy)(batch, params)
        return fit(value, slope)

    def hand(params: Any, batch: Tensor) -> object:
        tree, leaves = _leaves(params)
        x = batch.detach().requires_grad_()
        value = energy(x, tree)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        loss = fit(value, slope)
        return loss.detach(), torch.autograd.grad(loss, leaves)

    return _all_sides(task, hand, grad_and_value(by_torch), fn)


def _products(task: Function, name: str) -> dict[str, Side]:
    """Return products with the derivatives of a loss by the parameters: ours, torch's, by hand."""
    leaves, spec = tree_flatten(task.params)
    along = tuple(map(torch.ones_like, leaves))
    one = torch.ones_like(leaves[0].sum())

    def fn(batch: Tensor, *tensors: Tensor) -> Tensor:
        loss: Tensor = task.fn(tree_unflatten(list(tensors), spec), batch)
        return loss

    def ours(batch: Tensor) -> object:
        of = partial(fn, batch)
        if name == "vjp":
            return gradkit.func.vjp(of, *leaves)[1](one)
        if name == "linearize":
            return gradkit.func.linearize(of, *leaves)[1](*along)
        mode: Any = {} if name == "hvp" else {"mode": "reverse-over-reverse"}
        return gradkit.func.hvp(of, tuple(leaves), along, **mode)

    def raw(batch: Tensor) -> object:
        of = partial(fn, batch)
        if name == "vjp":
            return vjp(of, *leaves)[1](one)
        if name == "linearize":
            return linearize(of, *leaves)[1](*along)
        slope = grad(of, tuple(range(len(leaves))))
        if name == "hvp":
            return jvp(slope, tuple(leaves), along)
        return vjp(slope, *leaves)[1](along)

    def hand(batch: Tensor) -> object:
        new = [x.detach().requires_grad_() for x in leaves]
        loss = fn(batch, *new)
        if name == "vjp":
            return torch.autograd.grad(loss, new, one)
        if name == "linearize":  # the derivative, by the cotangent, of the gradient
            zero = torch.zeros_like(one).requires_grad_()
            pulled = torch.autograd.grad(loss, new, zero, create_graph=True)
            return torch.autograd.grad(pulled, zero, along)
        grads = torch.autograd.grad(loss, new, create_graph=True)
        return torch.autograd.grad(grads, new, along)

    calls = {"gradkit": ours, "raw": raw, "hand": hand}
    return {name: Side(task.build, call) for name, call in calls.items()}


def _of_losses(task: Function) -> dict[str, Side]:
    """Return the ways to the gradients of several losses."""

    def fn(params: Any, batch: Tensor) -> list[Tensor]:
        loss = task.fn(params, batch)
        return [loss * (index + 1) for index in range(_LOSSES)]

    def hand(params: Any, batch: Tensor) -> object:
        tree, leaves = _leaves(params)
        losses = fn(tree, batch)
        return [torch.autograd.grad(x, leaves, retain_graph=x is not losses[-1]) for x in losses]

    learned, _ = _leaves(task.params)
    result = _all_sides(task, hand, jacrev(lambda *args: torch.stack(fn(*args))), fn)
    ours = gradkit.func.per_loss_grads(fn)
    result["gradkit"] = Side(task.build, lambda batch: ours(task.params, batch))
    result["eager"] = Side(
        task.build, lambda batch: gradkit.per_loss_grads(fn(learned, batch), learned)
    )
    del result["cut"]
    return result
