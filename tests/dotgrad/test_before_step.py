"""What is looked at before a step: scaled losses, the scaler's stage, states that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradkit
from tests.dotgrad.test_kernels import CLASSES, combinations
from tests.helpers import assert_same_bits, others_slow

Scaler: Any = torch.amp.GradScaler


def weight(device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, device=device))


SCALED: dict[str, Callable[[Any, Tensor], Any]] = {
    "alone": lambda s, w: s.scale(w.sum()),
    "in a tree": lambda s, w: {"a": w.sum(), "b": s.scale(w.mean())},
    "a list": lambda s, w: s.scale([w.sum(), w.mean()]),
    "a sum": lambda s, w: s.scale(w.sum()) + s.scale(w.mean()),
    "one of a sum": lambda s, w: w.sum() - s.scale(w.mean()),
    "over steps": lambda s, w: s.scale(w.sum()) / 2,
    "negative": lambda s, w: -s.scale(w.sum()) * 3,
    "a mean of losses": lambda s, w: torch.stack([s.scale(w.sum()), w.sum()]).mean(),
    "a vector": lambda s, w: s.scale(w).sum(),
    "before an update": lambda s, w: (s.scale(w.sum()), s.update(4.0))[0],
    "by a number": lambda s, w: w.sum() * s.get_scale(),
    "by a number first": lambda s, w: s.get_scale() * w.sum() + w.sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("own", [True, False])
def test_a_scaled_loss_is_refused(device: torch.device, name: str, own: bool) -> None:
    scaler, other, w = (*(Scaler(device.type, init_scale=8.0) for _ in range(2)), weight(device))
    losses = SCALED[name](scaler if own else other, w)
    with pytest.raises(gradkit.OptionError, match=r"losses.* is not scaled.*\n.*scaler=scaler"):
        gradkit.minimize_(optim.SGD([w], lr=0.1), losses, scaler=scaler)
    assert w.tolist() == [1, 1]
    gradkit.minimize_(optim.SGD([w], lr=0.5), w.sum(), scaler=scaler)
    assert w.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "name", [name for name in SCALED if name.split()[-1] not in {"vector", "number", "first"}]
)
def test_a_scaled_loss_and_no_scaler(device: torch.device, name: str) -> None:
    w, scaler = weight(device), Scaler(device.type)
    with pytest.raises(gradkit.OptionError, match="would not be unscaled"):
        gradkit.minimize_(optim.SGD([w], lr=0.1), SCALED[name](scaler, w))
    assert w.tolist() == [1, 1]


def test_a_loss_times_a_tensor_is_not_scaled(device: torch.device) -> None:
    w, scaler, half = weight(device), Scaler(device.type), torch.tensor(0.5, device=device)
    optimizer = optim.SGD([w], lr=0.5)
    for options in ({}, {"scaler": scaler}):
        for loss in (w.sum() * half, w.sum() * torch.tensor(0.5, device=device)):
            gradkit.minimize_(optimizer, loss, **options)
            scaler.scale(w.sum())
            scaler.update(scaler.get_scale())
    assert w.tolist() == [0, 0]
    penalty = torch.autograd.grad(scaler.scale((w**3).sum()), w, create_graph=True)[0]
    loss = w.sum() + (penalty / scaler.get_scale()).square().sum()  # torch's example of a penalty
    gradkit.minimize_(optimizer, loss, scaler=scaler)


@pytest.mark.parametrize("fused", [False, True])
def test_stages_of_a_scaler(device: torch.device, fused: bool) -> None:
    w = weight(device)
    optimizer, scaler = optim.Adam([w], lr=0.1, fused=fused), Scaler(device.type, init_scale=8.0)
    ones, other = [torch.ones_like(w)], optim.SGD([weight(device)])
    with pytest.raises(gradkit.OptionError, match=r"scaled nothing.*\n.*scaler.scale\(loss\)"):
        gradkit.step_(optimizer, [w], ones, scaler=scaler)
    gradkit.minimize_(optimizer, w.sum(), scaler=scaler)
    before = w.detach().clone()
    for call in (
        lambda: gradkit.minimize_(optimizer, w.sum(), scaler=scaler),
        lambda: gradkit.step_(optimizer, [w], ones, scaler=scaler),
        lambda: gradkit.minimize_([optimizer, other], w.sum(), scaler=scaler),
    ):
        with pytest.raises(gradkit.OptionError, match=r"scaler.update\(\)"):
            call()
    scaler.update()
    w.grad = torch.zeros_like(w)
    scaler.unscale_(optimizer)
    with pytest.raises(gradkit.OptionError, match=r"leave out scaler.unscale_\(optimizer\)"):
        gradkit.minimize_(optimizer, w.sum(), scaler=scaler)
    assert_same_bits([w], [before])
    scaler.update()
    gradkit.minimize_(optimizer, w.sum(), scaler=scaler)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_unscale_of_nothing_is_as_if_it_were_not_there(
    device: torch.device, fused: bool, max_norm: float | None
) -> None:
    """The line of a loop that stays: with every `.grad` None, torch's step raises."""

    def after(line: bool, whole: bool) -> Tensor:
        w, scaler = weight(device), Scaler(device.type, init_scale=1024.0)
        optimizer = optim.SGD([w], lr=0.1, fused=fused)
        for _ in range(2):
            loss = scaler.scale((w * w).sum())
            _, grads = gradkit.value_and_grads(loss, [w])
            if line:
                scaler.unscale_(optimizer)
            options: Any = {"scaler": scaler, "max_norm": max_norm}
            if whole:
                gradkit.minimize_(optimizer, (w * w).sum(), **options)
            else:
                gradkit.step_(optimizer, [w], grads, **options)
            scaler.update()
        return w.detach()

    assert_same_bits([after(True, True), after(True, False)], [after(False, True)] * 2)


def test_a_skipped_step_leaves_the_scaler_whole(device: torch.device) -> None:
    w, scaler = weight(device), Scaler(device.type, init_scale=8.0)
    optimizer = optim.SGD([w], lr=0.25)
    for factor in (1.0, 100.0, 1.0):
        _, grads = gradkit.value_and_grads(scaler.scale(factor * w.sum()), [w])
        if gradkit.tree.global_norm(grads) / scaler.get_scale() > 50:
            continue
        gradkit.step_(optimizer, [w], grads, scaler=scaler)
        scaler.update()
    assert w.tolist() == [0.5, 0.5]


def twins(cls: Any, hyper: dict[str, Any], device: torch.device) -> list[tuple[Any, Any]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3, device=device)) for _ in range(10)]
    pair = [params, copy.deepcopy(params)]
    return [(some, cls(some, lr=0.1, **hyper)) for some in pair]


def loop(params: Any, optimizer: Any, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.sin(p.detach() + i + step)
    optimizer.step()
    optimizer.zero_grad()


def tensors(params: Any, optimizer: Any) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for p in params]
    entries = [x for state in states for x in state.values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in (*params, *entries)]


@pytest.mark.long
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "dtype", others_slow([torch.bfloat16, torch.float16, torch.float64], [torch.bfloat16])
)
def test_states_of_another_dtype(device: torch.device, cls: Any, dtype: torch.dtype) -> None:
    """The bits of the loop; or refused, where torch raises with half of the step taken."""
    for hyper in combinations(cls):
        (ours, mine), (theirs, usual) = twins(cls, hyper, device)
        for params, optimizer in ((ours, mine), (theirs, usual)):
            loop(params, optimizer, 0)
            for state in optimizer.state.values():
                for name, x in state.items():
                    if isinstance(x, Tensor) and x.dim():
                        state[name] = x.to(dtype)
        before = tensors(ours, mine)
        grads = [torch.sin(p.detach() + i + 1) for i, p in enumerate(ours)]
        try:
            for step in (1, 2):
                loop(theirs, usual, step)
        except RuntimeError:
            for call in (
                lambda: gradkit.step_(mine, ours, grads),  # noqa: B023 (called in this turn)
                lambda: gradkit.minimize_(mine, sum(p.sum() for p in ours)),  # noqa: B023
            ):
                with pytest.raises(gradkit.StructureError, match=r"\n.*load_state_dict"):
                    call()
            assert_same_bits(tensors(ours, mine), before)
            mine.load_state_dict(mine.state_dict())
            gradkit.step_(mine, ours, grads)
            continue
        for step in (1, 2):
            loss: Any = sum((g * p).sum() for g, p in zip(grads, ours, strict=True))
            gradkit.minimize_(mine, loss)
            grads = [torch.sin(p.detach() + i + (step + 1)) for i, p in enumerate(ours)]
        assert_same_bits(tensors(ours, mine), tensors(theirs, usual))


@pytest.mark.parametrize("cls", [optim.Adam, optim.NAdam, optim.Adafactor, optim.SGD])
@pytest.mark.parametrize("defect", ["shape", "missing", "count"])
def test_a_state_that_does_not_fit_changes_nothing(
    device: torch.device, cls: Any, defect: str
) -> None:
    hyper = {"momentum": 0.9} if cls is optim.SGD else {}
    (params, optimizer), _ = twins(cls, hyper, device)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 3, device=device))]})
    last = optimizer.param_groups[1]["params"][0]
    loop([*params, last], optimizer, 0)
    state = optimizer.state[last]
    name = "step" if defect == "count" else next(n for n, x in state.items() if x.dim())
    if name not in state or (defect == "missing" and cls in {optim.SGD, optim.Adafactor}):
        return
    state.pop(name)
    if defect != "missing":
        state[name] = torch.ones(5, 2, device=device)
    before = tensors([*params, last], optimizer)
    where = r"optimizer.param_groups\[1\]\['params'\]\[0\], its state"
    for options in ({}, {"max_norm": 1.0}, {"scaler": Scaler(device.type)}):
        with pytest.raises(gradkit.StructureError, match=where):
            gradkit.minimize_(optimizer, sum(p.sum() for p in (*params, last)), **options)
    assert_same_bits(tensors([*params, last], optimizer), before)
    gradkit.minimize_(optimizer, sum(p.sum() for p in params))  # which does not step that one
    optimizer.state.pop(optimizer.param_groups[1]["params"][0])
    gradkit.minimize_(optimizer, last.sum())


def test_a_fused_optimizer_with_an_unfused_state(device: torch.device) -> None:
    p, q = weight(device), weight(device)
    saved, optimizer = optim.Adam([q], fused=False), optim.Adam([p], fused=True)
    gradkit.minimize_(saved, q.sum())
    loaded: Any = saved.state_dict()
    optimizer.load_state_dict(copy.deepcopy(loaded))
    before, scaler = set(vars(optimizer)), Scaler(device.type, init_scale=4.0)
    with pytest.raises(gradkit.UnsupportedOptimizerError, match=r"fused.*\n.*\"fused\"\] = True"):
        gradkit.minimize_(optimizer, p.sum(), scaler=scaler)
    assert set(vars(optimizer)) == before
    gradkit.minimize_(optimizer, p.sum())
    loaded["param_groups"][0]["fused"] = True
    optimizer.load_state_dict(loaded)
    gradkit.minimize_(optimizer, p.sum(), scaler=scaler)
    optimizer.state[p]["step"] = optimizer.state[p]["step"].double()
    with pytest.raises(gradkit.StructureError, match="count in float32"):
        gradkit.minimize_(optimizer, p.sum())


def test_a_fused_step_that_raises_leaves_no_attribute(device: torch.device) -> None:
    p, scaler = weight(device), Scaler(device.type, init_scale=4.0)
    optimizer = optim.Adam([p], fused=True)
    gradkit.minimize_(optimizer, p.sum(), scaler=scaler)
    scaler.update()
    before, handle = set(vars(optimizer)), optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradkit.minimize_(optimizer, p.sum(), scaler=scaler)
    handle.remove()
    assert set(vars(optimizer)) == before
    gradkit.minimize_(optimizer, p.sum(), scaler=scaler)


FUSED: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {}), (optim.Adam, {"amsgrad": True}), (optim.AdamW, {}),
    (optim.SGD, {"momentum": 0.9}), (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, {}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "hyper"), FUSED)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1e6}, {"scaler": True}])
def test_fused_steps_pair_indices(
    device: torch.device, cls: Any, hyper: dict[str, Any], options: dict[str, Any]
) -> None:
    """After a cast to channels_last in mid-run; torch's fused step pairs memory."""

    def trained(fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 2, 2).to(device)
        x = torch.randn(2, 3, 4, 4, device=device)
        optimizer = cls(model.parameters(), lr=0.1, fused=fused, **hyper)
        scaler = Scaler(device.type, init_scale=4.0)
        held: Any = None
        for step in range(4):
            if step == 2:
                model.to(memory_format=torch.channels_last)
                held = [v for v in optimizer.state[model.weight].values() if v.dim()]
            given = {"scaler": scaler} if "scaler" in options else options
            gradkit.minimize_(optimizer, model(x).square().mean(), **given)
            if given is not options:
                scaler.update()
        states = optimizer.state[model.weight].values()
        assert all(any(v is x for x in states) for v in held)
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(True), trained(False))


def test_a_fused_step_of_a_parameter_with_gaps_is_refused(device: torch.device) -> None:
    base = torch.arange(16.0, device=device).view(4, 4)
    p = nn.Parameter(base[:, ::2])
    before = base.clone()
    for optimizer in (optim.SGD([p], lr=0.1, fused=True), optim.Adam([p], fused=True)):
        with pytest.raises(gradkit.UnsupportedOptimizerError, match="strides"):
            gradkit.minimize_(optimizer, p.sum())
        with pytest.raises(gradkit.UnsupportedOptimizerError, match="strides"):
            gradkit.step_(optimizer, [p], [torch.ones_like(p)])
    assert_same_bits([base], [before])
    gradkit.minimize_(optim.SGD([p], lr=0.1, fused=False), p.sum())


class WritesData(optim.Optimizer):
    """As many written before torch.no_grad() do it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


STEPS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD([p], lr=1.0, fused=True),
    "Adam": lambda p: optim.Adam([p], lr=1.0, fused=True),
    "Adagrad": lambda p: optim.Adagrad([p], lr=1.0, fused=True),
    "foreach": lambda p: optim.Adam([p], lr=1.0, foreach=True),
    "data": lambda p: WritesData([p], lr=1.0),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"scaler": True}])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_graph_from_before_a_step_is_refused(
    device: torch.device, name: str, options: dict[str, Any], steps_before: int
) -> None:
    d, g = (nn.Parameter(torch.tensor([x], device=device)) for x in (2.0, 3.0))
    optimizer, scaler = STEPS[name](d), Scaler(device.type, init_scale=4.0)
    if "scaler" in options and name == "data":
        return  # a scaler may have skipped the step
    for _ in range(steps_before):
        gradkit.minimize_(optimizer, (d * 3).sum())
    for how in range(2):
        score = (d * g).sum()
        given = {"scaler": scaler} if "scaler" in options else options
        if how and "scaler" not in given:
            gradkit.step_(optimizer, [d], [torch.ones_like(d)], **given)
        else:
            gradkit.minimize_(optimizer, (d * 3).sum(), **given)
        if "scaler" in given:
            scaler.update()
        with pytest.raises(gradkit.UnsupportedGraphError):
            gradkit.value_and_grads(score, g)


def test_checked_marks_what_torchs_own_fused_step_writes(device: torch.device) -> None:
    d, g = (nn.Parameter(torch.tensor([x], device=device)) for x in (2.0, 3.0))
    optimizer = optim.SGD([d], lr=1.0, fused=True)
    with gradkit.checked():
        score = (d * g).sum()
        d.grad = torch.ones_like(d)
        optimizer.step()
        with pytest.raises(gradkit.UnsupportedGraphError):
            gradkit.value_and_grads(score, g)
