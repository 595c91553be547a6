"""What the steps of an inner loop pass on besides the parameters: buffers; and the trajectory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call, jvp
from torch.func import grad as func_grad

import gradkit
from gradkit import meta
from tests.helpers import World, assert_same_bits, unchanged
from tests.meta.test_unroll import (
    MEMORY,
    STEPS,
    D,
    Problem,
    assert_close,
    gradients,
    leaves,
    random,
)

every_memory = pytest.mark.parametrize("memory", MEMORY)
each_way = pytest.mark.parametrize("memory", ["store", "recompute", 2])


class Averaging:
    """A problem whose loss keeps an average of its outputs, and counts the steps."""

    def __init__(self, device: torch.device) -> None:
        self.p = Problem(device)
        self.start = {"mean": random(device, 2, learned=True), "count": torch.zeros((), dtype=int)}

    def loss(self, params: Any, buffers: Any, outer: Any, batch: Any) -> tuple[Tensor, Any]:
        x = batch[0] if isinstance(batch, tuple) else batch["x"]
        out = (x @ params["w"] + params["more"][0]).tanh() @ params["more"][1]
        mean = 0.5 * buffers["mean"] + out.mean(0)
        loss = outer["scale"].exp() * ((out - mean * outer["target"]) ** 2).mean()
        return loss, {"mean": mean, "count": buffers["count"] + 1}

    def loss_and_aux(self, *args: Any) -> tuple[Tensor, Any, Any]:
        loss, buffers = self.loss(*args)
        return loss, buffers, {"twice": 2 * loss}

    def learned(self) -> list[Tensor]:
        return [*self.p.learned(), self.start["mean"]]


def plain(case: Averaging, opt: meta.Optimizer, *, first_order: bool = False) -> meta.Adapted:
    """The loop as one would write it."""
    p, buffers = case.p, case.start
    params, state = p.params, opt.init(p.params)
    values, trajectory = [], []
    for batch in p.batches:
        loss, buffers = case.loss(params, buffers, p.outer, batch)
        rest = iter(gradients(loss, leaves(params), create_graph=True))
        grads = gradkit.tree.map(lambda _, rest=rest: next(rest), params)
        if first_order:
            grads = gradkit.tree.map(Tensor.detach, grads)
            buffers = {name: buffer.detach() for name, buffer in buffers.items()}
        params, state = opt.step(params, grads, state)
        values.append(loss)
        trajectory.append(params)
    return meta.Adapted(params, state, torch.stack(values), [], buffers, trajectory)


def of_all_steps(adapted: meta.Adapted) -> Tensor:
    """A meta-loss of the parameters after each step, each with a weight of its own."""
    trees = [torch.cat([t.flatten() for t in leaves(tree)]) for tree in adapted.trajectory]
    return torch.stack([(k + 1) * t.sin().square().sum() for k, t in enumerate(trees)]).sum()


@every_memory
@pytest.mark.parametrize("name", ["sgd", "adam", "NAdam"])
def test_buffers_and_trajectory_are_those_of_the_plain_loop(
    device: torch.device, memory: Any, name: str
) -> None:
    case = Averaging(device)
    world = World(*case.learned())
    got = meta.unroll(
        case.loss_and_aux,
        case.p.params,
        case.p.batches,
        case.p.opt(name),
        outer=case.p.outer,
        buffers=case.start,
        memory=memory,
        trajectory=True,
        has_aux=True,
    )
    expected = plain(case, case.p.opt(name))
    assert len(got.trajectory) == STEPS
    assert_close(leaves(got.trajectory), leaves(expected.trajectory))
    assert got.trajectory[-1] is got.params
    assert_close(leaves(got.buffers), leaves(expected.buffers))
    assert got.buffers["count"] == STEPS
    assert_close([one["twice"] for one in got.aux], 2 * got.values.detach())
    height = lambda out: of_all_steps(out) + out.buffers["mean"].sin().sum() + out.values.prod()  # noqa: E731
    meta_grads = gradients(height(got), case.learned())
    assert_close(meta_grads, gradients(height(expected), case.learned()))
    assert meta_grads[-1] is not None
    assert meta_grads[-1].all()
    world.assert_unchanged()


@every_memory
def test_to_first_order_buffers_are_constants(device: torch.device, memory: Any) -> None:
    case = Averaging(device)
    got = meta.unroll(
        case.loss,
        case.p.params,
        case.p.batches,
        case.p.opt(),
        outer=case.p.outer,
        buffers=case.start,
        memory=memory,
        first_order=True,
        trajectory=True,
    )
    expected = plain(case, case.p.opt(), first_order=True)
    assert not got.buffers["mean"].requires_grad
    assert_close([got.buffers["mean"]], [expected.buffers["mean"]])
    assert_close(
        gradients(of_all_steps(got), case.learned()),
        gradients(of_all_steps(expected), case.learned()),
    )


@each_way
def test_meta_gradients_of_the_trajectory_are_those_of_differences(
    device: torch.device, memory: Any
) -> None:
    x = random(device, 3, 2)

    def after(w: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        def loss(w: Tensor, mean: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            out = x @ w
            return scale.exp() * (out - mean).sin().square().sum(), 0.5 * (mean + out.mean())

        opt = meta.sgd(lr=0.1, momentum=0.9)
        adapted = meta.unroll(
            loss, w, [x] * 3, opt, outer=scale, buffers=mean, memory=memory, trajectory=True
        )
        return of_all_steps(adapted) + adapted.buffers.sin()

    by = [random(device, *shape, learned=True) for shape in ((2,), (), ())]
    assert gradcheck(after, by)
    slopes = func_grad(after, (0, 1, 2))(*[t.detach() for t in by])
    assert_close(slopes, gradients(after(*by), by))
    along = [random(device, *t.shape) for t in by]
    got = jvp(after, tuple(t.detach() for t in by), tuple(along))[1]
    assert_close([got], [sum((s * a).sum() for s, a in zip(slopes, along, strict=True))])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@every_memory
@pytest.mark.parametrize("writes", [False, True])
def test_batch_norm_keeps_its_statistics_in_buffers(
    device: torch.device, memory: Any, writes: bool
) -> None:
    model = network().to(device, D)
    call, params, buffers = gradkit.func.make_functional(model)
    batches = [random(device, 6, 3) for _ in range(STEPS)]
    world = World(*params.values(), *buffers.values())

    def loss(params: Any, buffers: Any, _: Any, x: Tensor) -> tuple[Tensor, Any]:
        if writes:
            out = functional_call(model, (params, buffers), (x,))  # it writes to the buffers
        else:
            out, buffers = call(params, buffers, x)
        return out.sin().square().sum(), buffers

    opt = meta.sgd(lr=0.1)
    got = meta.unroll(loss, params, batches, opt, buffers=buffers, memory=memory)
    meta_loss = sum(t.sin().sum() for t in got.params.values())
    first = gradients(meta_loss, params.values(), retain_graph=True)
    assert_same_bits(gradients(meta_loss, params.values()), first)
    world.assert_unchanged()
    now, after = params, None
    for x in batches:  # the same with the module itself, which keeps its statistics
        after = functional_call(model, now, (x,)).sin().square().sum()
        slopes = gradients(after, now.values(), create_graph=True)
        now = {n: p - 0.1 * s for (n, p), s in zip(now.items(), slopes, strict=True)}
    assert_close(got.params.values(), now.values())
    assert_close(got.buffers.values(), dict(model.named_buffers()).values())
    assert_close(first, gradients(sum(t.sin().sum() for t in now.values()), params.values()))


def test_over_tasks_it_is_the_loop(device: torch.device) -> None:
    w, tasks = random(device, 3), random(device, 4, 3)

    def meta_loss(w: Tensor, task: Tensor) -> Tensor:
        def loss(w: Tensor, mean: Tensor, _: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return ((w - x + mean) ** 4).sum(), 0.5 * (mean + w)

        start = torch.zeros(3, dtype=D, device=device)
        adapted = meta.unroll(loss, w, [task] * 3, meta.sgd(lr=0.1), buffers=start, trajectory=True)
        return of_all_steps(adapted) + adapted.buffers.sum()

    _, got = meta.mean_value_and_grads(meta_loss, w, tasks)
    w.requires_grad_()
    mean = torch.stack([meta_loss(w, task) for task in tasks]).mean()
    assert_close([got], gradients(mean, w))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    w = random(device, 3, learned=True)

    def refused(error: Any, text: str, returned: Any, **options: Any) -> None:
        def loss(w: Tensor, buffers: Any, outer: Any, batch: Any) -> Any:
            return returned((w**2).sum(), buffers)

        options = {"buffers": {"a": w.detach()}, **options}
        with unchanged(w), pytest.raises(error, match=text):
            meta.unroll(loss, w, [()] * 2, meta.sgd(lr=0.1), **options)

    structure = gradkit.StructureError
    for memory in ("store", "recompute", 2):
        refused(structure, r"expected \(loss, buffers\), got", lambda x, b: x, memory=memory)
        refused(structure, r"'a'", lambda x, b: (x, {}), memory=memory)
    refused(structure, r"expected \(loss, buffers, aux\)", lambda x, b: (x, b), has_aux=True)
    refused(gradkit.NotScalarLossError, "one loss", lambda x, b: ([x, x], b))
    refused(gradkit.OptionError, "^trajectory: ", lambda x, b: (x, b), trajectory=1)
    captured = random(device, learned=True)
    for memory in ("recompute", 2):
        refused(
            gradkit.UnsupportedGraphError,
            "outer=",
            lambda x, b: (x, {"a": b["a"] * captured}),
            memory=memory,
        )
