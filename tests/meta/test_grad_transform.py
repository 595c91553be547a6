"""grad_transform of three arguments: learned optimizers, and rates for each step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import gradkit
from gradkit import meta
from tests.helpers import World, unchanged
from tests.meta.test_unroll import (
    MEMORY,
    STEPS,
    Problem,
    assert_close,
    gradients,
    height,
    leaves,
    plain,
    random,
)

every_memory = pytest.mark.parametrize("memory", MEMORY)


class Learned:
    """A learned optimizer: each gradient by a small network of it and of its average."""

    def __init__(self, device: torch.device) -> None:
        self.p = Problem(device)
        self.net = {
            "in": random(device, 2, 3, learned=True),
            "out": random(device, 3, 1, learned=True),
        }
        self.rates = random(device, STEPS, learned=True)
        self.outer = {**self.p.outer, "net": self.net, "rates": self.rates}

    def transform(self, grads: Any, outer: Any, state: Any) -> Any:
        def one(grad: Tensor, mean: Tensor | None, step: int) -> Tensor:
            assert isinstance(step, int)
            known = torch.stack([grad, torch.zeros_like(grad) if mean is None else mean], -1)
            out = (known @ outer["net"]["in"]).tanh() @ outer["net"]["out"]
            return outer["rates"][step].exp() * (grad + out.squeeze(-1))

        means, steps = state["momentum_buffer"], state["step"]
        return {
            "w": one(grads["w"], means["w"], steps["w"]),
            "more": [
                one(*args) for args in zip(grads["more"], means["more"], steps["more"], strict=True)
            ],
            "none": grads["none"],
        }

    def learned(self) -> list[Tensor]:
        return [*self.net.values(), self.rates, *self.p.learned()]


def loop(case: Learned, grad: Callable[[Tensor], Tensor]) -> meta.Adapted:
    """The loop as one would write it, with `grad` of each inner gradient."""
    p, opt = case.p, case.p.opt()
    params, state, values = p.params, opt.init(p.params), []
    for batch in p.batches:
        loss = p.loss(params, case.outer, batch)
        rest = iter(gradients(loss, leaves(params), create_graph=True))
        grads = gradkit.tree.map(lambda _, rest=rest: grad(next(rest)), params)
        params, state = opt.step(params, case.transform(grads, case.outer, state), state)
        values.append(loss)
    return meta.Adapted(params, state, torch.stack(values))


@every_memory
@pytest.mark.parametrize("first_order", [False, True])
def test_a_learned_optimizer_is_the_plain_loop(
    device: torch.device, memory: Any, first_order: bool
) -> None:
    case = Learned(device)
    world = World(*case.learned())
    got = meta.unroll(
        case.p.loss,
        case.p.params,
        case.p.batches,
        case.p.opt(),
        outer=case.outer,
        memory=memory,
        first_order=first_order,
        grad_transform=case.transform,
    )
    expected = loop(case, Tensor.detach if first_order else lambda grad: grad)
    assert_close(leaves(got.params), leaves(expected.params))
    assert_close(got.values, expected.values)
    assert got.state["step"] == {"w": STEPS, "more": [STEPS, STEPS], "none": None}
    meta_grads = gradients(height(got), case.learned())
    assert_close(meta_grads, gradients(height(expected), case.learned()))
    assert all(grad is not None and grad.any() for grad in meta_grads)
    world.assert_unchanged()


@pytest.mark.parametrize("memory", ["store", "recompute", 2])
def test_meta_gradients_are_those_of_differences(device: torch.device, memory: Any) -> None:
    x, w = random(device, 3, 2), random(device, 2)
    by = [random(device, learned=True), random(device, 3, learned=True)]

    def after(scale: Tensor, rates: Tensor) -> Tensor:
        adapted = meta.unroll(
            lambda w, outer, x: outer[0].exp() * (x @ w).sin().square().sum(),
            w,
            [x] * 3,
            meta.sgd(lr=0.1),
            outer=(scale, rates),
            memory=memory,
            grad_transform=lambda g, outer, state: outer[1][state["step"]] * g * g.norm(),
        )
        return adapted.values.sum() + adapted.params.sin().sum()

    assert gradcheck(after, by)


def test_only_values_of_a_learned_optimizer_have_a_graph_to_first_order(
    device: torch.device,
) -> None:
    """Whoever learns no optimizer from them does not pay for the graph of each step."""
    w, scale = random(device, 3, learned=True), random(device, learned=True)

    def run(transform: Any) -> meta.Adapted:
        return meta.unroll(
            lambda w, _, x: (w**4).sum(),
            w,
            [()] * 3,
            meta.sgd(lr=0.1),
            outer=scale,
            first_order=True,
            grad_transform=transform,
        )

    assert not run(lambda grads: grads).values.requires_grad
    assert run(lambda grads, outer, state: outer * grads).values.requires_grad
    with torch.no_grad():
        assert not run(lambda grads, outer, state: outer * grads).values.requires_grad


@pytest.mark.parametrize("first_order", [False, True])
def test_over_tasks_it_is_the_loop(device: torch.device, first_order: bool) -> None:
    outer = {"w": random(device, 3), "scale": random(device)}
    tasks = random(device, 4, 3)

    def meta_loss(outer: Any, task: Tensor) -> Tensor:
        adapted = meta.unroll(
            lambda w, outer, x: ((w - x) ** 4).sum() * outer.exp(),
            outer["w"],
            [task] * 3,
            meta.sgd(lr=0.1, momentum=0.5),
            outer=outer["scale"],
            first_order=first_order,
            grad_transform=lambda g, outer, state: outer.exp() * g / (state["step"] + 1),
        )
        return adapted.values.sum() + (adapted.params - task).square().sum()

    _, got = meta.mean_value_and_grads(meta_loss, outer, tasks)
    by = [t.requires_grad_() for t in outer.values()]
    mean = torch.stack([meta_loss(outer, task) for task in tasks]).mean()
    assert_close(got.values(), gradients(mean, by))


def two(grads: Any, outer: Any) -> Any:
    return grads


@pytest.mark.parametrize(
    "transform",
    [
        3,
        two,
        lambda: None,
        lambda *args: args[0],
        lambda grads, outer=None, state=None: grads,
        lambda grads, *, norm: grads,
        nn.Identity(),
    ],
)
def test_what_it_takes_must_be_clear(device: torch.device, transform: Any) -> None:
    w = random(device, 3, learned=True)
    never = lambda *_: pytest.fail("the loss has run")  # noqa: E731
    with unchanged(w), pytest.raises(gradkit.OptionError, match=r"\(grads, outer, state\)"):
        meta.unroll(never, w, [()], meta.sgd(lr=0.1), grad_transform=transform)


def clipped(grads: Tensor, norm: float = 1.0) -> Tensor:
    return grads.clamp(-norm, norm)


@pytest.mark.parametrize(
    "transform",
    [torch.sign, clipped, functools.partial(clipped, norm=0.1), lambda g, *, norm=1.0: norm * g],
)
def test_what_takes_the_gradients_alone(device: torch.device, transform: Any) -> None:
    w = random(device, 3)

    def loss(w: Tensor, _: Any, x: Tensor) -> Tensor:
        return (w**2).sum()

    got = meta.unroll(loss, w, [w], meta.sgd(lr=0.1), grad_transform=transform)
    expected = plain(loss, w, [w], meta.sgd(lr=0.1), transform=transform)
    assert_close([got.params], [expected.params])
