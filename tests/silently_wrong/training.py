"""torch.optim with differentiable=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

import gradkit
from gradkit import meta
from tests.silently_wrong._row import Case, D, Row


def theirs(cls: Any, grads: list[Tensor], **hyper: Any) -> Tensor:
    """Return where steps along these gradients lead from 1."""
    p = torch.ones_like(grads[0])
    optimizer = cls([p], differentiable=True, foreach=False, **hyper)
    for g in grads:
        p.grad = g
        optimizer.step()
    return p


def ours(opt: meta.Optimizer, grads: list[Tensor]) -> Tensor:
    p = torch.ones_like(grads[0])
    state = opt.init(p)
    for g in grads:
        p, state = opt.step(p, g, state)
    return p


def by(x: Tensor, out: Tensor) -> Tensor | None:
    return torch.autograd.grad(out.sum(), x, allow_unused=True)[0]


def differences(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach()
    return ((f(x + 1e-6) - f(x - 1e-6)) / 2e-6).sum()


def learned(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=D, device=device, requires_grad=True)


def first_step_with_momentum(device: torch.device) -> Case:
    x, ones = learned(0.5, device), torch.ones(1, dtype=D, device=device)
    hyper = {"lr": 0.1, "momentum": 0.9}

    def run(x: Tensor) -> Tensor:
        return theirs(optim.SGD, [x * ones, x * ones], **hyper)

    return Case(
        by(x, run(x)),
        differences(run, x),
        lambda: by(x, ours(meta.sgd(**hyper), [x * ones, x * ones])),
    )


DEAD = {
    "adam": optim.Adam, "adamw": optim.AdamW, "nadam": optim.NAdam, "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
}  # fmt: skip


def a_dead_unit(device: torch.device) -> Case:
    x = learned(0.5, device)
    one_dead = torch.tensor([1.0, 0.0], dtype=D, device=device)
    hyper = {"lr": 0.1, "eps": 0.5}

    def run(cls: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: theirs(cls, [x * one_dead], **hyper)

    return Case(
        [by(x, run(cls)(x)) for cls in DEAD.values()],
        [differences(run(cls), x) for cls in DEAD.values()],
        lambda: [
            by(x, ours(meta.from_torch(cls, **hyper), [x * one_dead])) for cls in DEAD.values()
        ],
    )


def count_of_steps(device: torch.device) -> Case:
    ones = torch.ones(1, dtype=D, device=device)
    betas, count = (0.9, 0.999), 1
    first, second = ((1 - b) * ones / (1 - b**count) for b in betas)
    right = first / second.sqrt()
    hyper = {"lr": 1.0, "eps": 0.0, "betas": betas}
    return Case(
        (1 - theirs(optim.Adam, [ones], **hyper)) / right - 1,
        torch.zeros(1, dtype=D),
        lambda: (1 - ours(meta.adam(**hyper), [ones])) / right - 1,
    )


def weight_decay_that_is_learned(device: torch.device) -> Case:
    decay = learned(0.5, device)

    def gradient_after(step: Callable[[list[Tensor]], Tensor]) -> Tensor:
        grads = [torch.ones(1, dtype=D, device=device)]
        step(grads)
        return grads[0]

    return Case(
        gradient_after(lambda grads: theirs(optim.SGD, grads, lr=0.1, weight_decay=decay)),
        torch.ones(1, dtype=D),
        lambda: gradient_after(lambda grads: ours(meta.sgd(lr=0.1, weight_decay=decay), grads)),
    )


def learning_rate_of_asgd(device: torch.device) -> Case:
    lr, ones = learned(0.1, device), torch.ones(1, dtype=D, device=device)

    def run(lr: Any) -> Tensor:
        return theirs(optim.ASGD, [ones], lr=lr)

    return Case(
        by(lr, run(lr) + 0 * learned(0.0, device)),
        differences(lambda lr: run(lr.item()), lr),
        lambda: meta.from_torch(optim.ASGD, lr=lr),
    )


def fused_after_channels_last(device: torch.device) -> Case:
    def trained(fused: bool, step: Callable[[Any, Any], Any]) -> Tensor:
        conv = torch.nn.Conv2d(2, 1, 2, bias=False).to(device, D)
        with torch.no_grad():
            conv.weight.copy_(torch.arange(8.0).view_as(conv.weight))
        optimizer = optim.SGD(conv.parameters(), lr=0.1, momentum=0.5, fused=fused)
        for layout in (torch.contiguous_format, torch.channels_last):
            conv.to(memory_format=layout)
            step(optimizer, conv.weight.square().sum() / 2)
        return conv.weight.detach().flatten()

    def loop(optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Case(trained(True, loop), trained(False, loop), lambda: trained(True, gradkit.minimize_))


ROWS = [
    Row(
        "`SGD(momentum=0.5, fused=True)`, `channels_last` after one step: the weights after two "
        "steps",
        [0.0, 0.71, 1.42, 2.13, 3.19, 3.9, 4.61, 5.32],
        [0.0, 0.76, 1.52, 2.28, 3.04, 3.8, 4.56, 5.32], "`minimize_`, `step_`",
        fused_after_channels_last,
    ),
    Row(
        "two steps of `SGD(momentum=0.9)`: w.r.t. a factor of the gradients",
        -0.1, -0.29, "`meta.sgd`", first_step_with_momentum,
    ),
    Row(
        "a step of Adam, AdamW, NAdam, RMSprop and Adagrad, where one of two gradients is 0: "
        "w.r.t. a factor of the gradients",
        [float("nan")] * 5, [-0.05, -0.05, -0.0528, -0.1653, -0.05],
        "`meta.from_torch`", a_dead_unit,
    ),
    Row(
        "the first step of Adam in float64, `eps=0`: its relative error",
        [-6.604e-6], [0.0], "`meta.adam`", count_of_steps, tolerance=1e-8,
    ),
    Row(
        "a step of `SGD(weight_decay=tensor)`: `.grad` afterwards, which was 1",
        [1.5], [1.0], "`meta.sgd`", weight_decay_that_is_learned,
    ),
    Row(
        "a step of `ASGD(lr=tensor)`: w.r.t. the learning rate",
        None, -0.9985, "`meta.from_torch`", learning_rate_of_asgd,
        gradkit.UnsupportedOptimizerError,
    ),
]  # fmt: skip
