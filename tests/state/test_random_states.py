"""The random states of every device: also of one that no argument is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._state import rng
from gradkit.func import value_and_grads

Places = tuple[torch.device, torch.device]


@pytest.fixture(params=["there", "from the cpu", "to the cpu", "another"])
def places(device: torch.device, request: pytest.FixtureRequest) -> Places:
    """Return the device of the arguments, and the one that draws."""
    cpu = torch.device("cpu")
    if request.param == "another":
        if torch.accelerator.device_count() < 2 or device == cpu:
            pytest.skip("it needs two devices")
        return torch.device(device.type, 0), torch.device(device.type, 1)
    pairs = {"there": (device, device), "from the cpu": (cpu, device), "to the cpu": (device, cpu)}
    return pairs[request.param]


def noisy(w: Tensor, place: torch.device) -> Tensor:
    return dropout(w.to(place), 0.5).square()


def states(device: torch.device) -> list[Tensor]:
    module = torch.get_device_module(device)
    there = [] if device.type == "cpu" else [module.get_rng_state(device)]
    return [torch.get_rng_state(), *there]


def assert_states(device: torch.device, before: list[Tensor]) -> None:
    for now, then in zip(states(device), before, strict=True):
        assert torch.equal(now, then)


def seeded(run: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(3)
    return run(*args)


def test_a_function_that_runs_again_draws_the_same(places: Places) -> None:
    source, place = places
    w = torch.ones(64, device=source, requires_grad=True)
    run = gradkit.func.checkpoint(lambda w: noisy(w, place))

    def grads(fn: Callable[[Tensor], Tensor]) -> Any:
        return gradkit.value_and_grads(fn(w).sum(), w)

    expected, recomputed = seeded(grads, lambda w: noisy(w, place)), seeded(grads, run)
    assert all(map(torch.equal, recomputed, expected))


def test_a_checkpoint_of_torch_draws_the_same_or_is_refused(places: Places) -> None:
    """It puts back the generators of the devices of its arguments, and the CPU's."""
    source, place = places
    w = torch.ones(64, device=source, requires_grad=True)
    _, expected = seeded(lambda: gradkit.value_and_grads(noisy(w, place).sum(), w))
    loss = seeded(lambda: checkpoint(lambda w: noisy(w, place), w, use_reentrant=False)).sum()
    if place.type == "cpu" or source == place:
        assert torch.equal(gradkit.value_and_grads(loss, w)[1], expected)
        return
    with pytest.raises(gradkit.UnsupportedGraphError, match="none of its arguments is on"):
        gradkit.value_and_grads(loss, w)


def test_a_recomputed_step_draws_the_same(places: Places) -> None:
    source, place = places
    x = torch.randn(3, 4, device=source)

    def loss_fn(w: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        return (noisy(x @ w, place).sum().to(source)) * rate

    def meta_grad(memory: Any) -> Tensor:
        w = torch.ones(4, 4, device=source, requires_grad=True)
        rate = torch.ones((), device=source, requires_grad=True)
        sgd = gradkit.meta.sgd(lr=0.01)
        adapted = gradkit.meta.unroll(loss_fn, w, [x, x], sgd, outer=rate, memory=memory)
        (grad,) = torch.autograd.grad(adapted.params.square().sum(), rate)
        return grad

    stored, recomputed = (seeded(meta_grad, memory) for memory in ("store", "recompute"))
    assert torch.equal(stored, recomputed)


def test_after_an_error_they_are_as_before(places: Places) -> None:
    source, place = places
    w = torch.ones(4, device=source)
    before = states(place)
    with pytest.raises(gradkit.NotScalarLossError):
        value_and_grads(lambda w: noisy(w, place))(w)
    assert_states(place, before)
    with pytest.raises(ZeroDivisionError):
        gradkit.func.vjp(lambda w: noisy(w, place) * (1 / 0), w)
    assert_states(place, before)


def test_runs_that_are_compared_draw_the_same(places: Places) -> None:
    source, place = places
    net = nn.Linear(4, 4).to(source)
    before = states(place)
    report = gradkit.report.compare(
        lambda net, x: noisy(net(x), place).sum(), net, torch.ones(2, 4, device=source)
    )
    assert report.same
    assert_states(place, before)


def test_nothing_runs_again_while_a_graph_is_captured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, v = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    run = gradkit.func.checkpoint(torch.tanh)
    made = run(w)
    monkeypatch.setattr(rng, "is_capturing", lambda: True)
    with pytest.raises(gradkit.UnsupportedGraphError, match="capture of a CUDA graph"):
        run(w)
    with pytest.raises(gradkit.UnsupportedGraphError, match="capture of a CUDA graph"):
        made.sum().backward()
    monkeypatch.undo()
    _, (expected, grad) = gradkit.value_and_grads([torch.tanh(w).sum(), run(v).sum()], [w, v])
    assert torch.equal(grad, expected)
