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
_SMALL = 3  # networks whose step is short enough to show what a call costs


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each network and optimizer, and for steps beside former .grads."""
    for name in list(NETS)[:1] if plan.quick else NETS:
        for optimizer in OPTIMIZERS:
            both = sides(NETS[name], optimizer, plan.device)
            timings = measure(both, plan.device, plan.effort)
            what = f"training step with {optimizer}, {name}"
            yield timed(what, LOOP, timings, theirs="raw", limit=NETS[name].limit)
    for name in list(NETS)[: 1 if plan.quick else _SMALL]:
        timings = measure(
            sides(NETS[name], "SGD", plan.device, former=True), plan.device, plan.effort
        )
        what = f"training step with SGD beside former .grads, {name}"
        yield timed(what, LOOP, timings, theirs="raw", limit=NETS[name].limit)


def sides(
    net: Net, optimizer: str, device: torch.device, *, former: bool = False
) -> dict[str, Side]:
    """Return the ways to take a step, each with a network and an optimizer of its own."""
    # `former`: each parameter of gradkit's has a .grad, as where another loop trains it, too. That
    # of the loop always has one, which it clears.
    return {
        "gradkit": _side(net, optimizer, device, _ours, former=former),
        "raw": _side(net, optimizer, device, _raw),
    }


Step = Callable[[nn.Module, Any, Callable[[], Tensor]], None]


def _side(
    net: Net, optimizer: str, device: torch.device, step: Step, *, former: bool = False
) -> Side:
    model = net.make().to(device)
    if former:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
    steps = OPTIMIZERS[optimizer](model.parameters())

    def run(batch: Tensor) -> None:
        step(model, steps, lambda: net.loss(model, batch))

    return Side(lambda: net.batch(device), run)


def _ours(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    _, grads = gradkit.value_and_grads(loss(), model)
    gradkit.step_(optimizer, model, grads)


def _raw(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
