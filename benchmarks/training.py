"""A step of training as in the README, forward pass included, against the usual loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradkit
from benchmarks.harness import Side, measure
from benchmarks.nets import NETS, Net
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

LOOP = "zero_grad, backward, step"
# Steps so short that weights stay where they are.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-9, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=1e-9),
}
# What a prototype of minimize_ took, forward pass included.
_MINIMIZE = {
    (name, optimizer): limit
    for name, limits in zip(
        NETS, [(0.70, 0.85), (0.82, 0.74), (0.84, 0.72), (1.0, 1.0), (1.0, 0.98)], strict=True
    )
    for optimizer, limit in zip(OPTIMIZERS, limits, strict=True)
}
# Networks of several layers, whose step is short enough to show what a call costs.
_SMALL = list(NETS)[1:3]


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each network and optimizer, and for steps in some situations."""
    for name in list(NETS)[:1] if plan.quick else NETS:
        for optimizer in OPTIMIZERS:
            both = sides(NETS[name], optimizer, plan.device)
            both |= _others(NETS[name], optimizer, plan.device)
            timings = measure(both, plan.device, plan.effort)
            what = f"training step with {optimizer}, {name}"
            yield timed(what, LOOP, timings, theirs="raw", limit=NETS[name].limit)
            what, limit = f"minimize_ with {optimizer}, {name}", _MINIMIZE[name, optimizer]
            yield timed(what, LOOP, timings, ours="minimize_", theirs="raw", limit=limit)
            # So that nobody is misled: what the loop itself takes with torch's other kernels.
            for side in ("foreach=True", "fused=True"):
                what = f"the usual loop with {optimizer}({side}), {name}"
                yield timed(what, LOOP, timings, ours=side, theirs="raw", limit=None)
    for name in list(NETS)[:1] if plan.quick else _SMALL:
        for situation, arrange in SITUATIONS.items():
            both = sides(NETS[name], "SGD", plan.device, arrange)
            timings = measure(both, plan.device, plan.effort)
            what = f"training step with SGD, {situation}, {name}"
            yield timed(what, LOOP, timings, theirs="raw", limit=NETS[name].limit)


def sides(
    net: Net,
    optimizer: str,
    device: torch.device,
    arrange: Callable[[nn.Module], None] = lambda _: None,
) -> dict[str, Side]:
    """Return the ways to take a step, each with a network and an optimizer of its own."""
    return {
        "gradkit": _side(net, optimizer, device, arrange, _ours),
        "raw": _side(net, optimizer, device, arrange, _raw),
    }


def _others(net: Net, optimizer: str, device: torch.device) -> dict[str, Side]:
    """Return the step in one call, and the loop with the other kernels of torch's optimizers."""
    loops = {
        f"{option}=True": _side(net, optimizer, device, lambda _: None, _raw, **{option: True})
        for option in ("foreach", "fused")
    }
    return {"minimize_": _side(net, optimizer, device, lambda _: None, _minimize), **loops}


def _set_grads(model: nn.Module) -> None:
    """Give each parameter a .grad, as another loop does, whose parameters these are, too."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def _freeze_half(model: nn.Module) -> None:
    params = list(model.parameters())
    for param in params[: len(params) // 2]:
        param.requires_grad_(False)


SITUATIONS: Mapping[str, Callable[[nn.Module], None]] = {
    "beside former .grads": _set_grads,
    "half of it frozen": _freeze_half,
}


Step = Callable[[nn.Module, Any, Callable[[], Tensor]], None]


def _side(
    net: Net,
    optimizer: str,
    device: torch.device,
    arrange: Callable[[nn.Module], None],
    step: Step,
    **options: bool,
) -> Side:
    model = net.make().to(device)
    arrange(model)
    steps = OPTIMIZERS[optimizer](model.parameters(), **options)

    def run(batch: Tensor) -> None:
        step(model, steps, lambda: net.loss(model, batch))

    return Side(lambda: net.batch(device), run)


def _ours(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    _, grads = gradkit.value_and_grads(loss(), model)
    gradkit.step_(optimizer, model, grads)


def _minimize(_: nn.Module, optimizer: Any, loss: Callable[[], Tensor]) -> None:
    gradkit.minimize_(optimizer, loss())


def _raw(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
