"""Inside `checked()`, a checkpoint that recomputes other values is refused, and why is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._compat.checkpoints import determinism_checks
from tests.helpers import assert_same_bits

once = partial(checkpoint, use_reentrant=False)
D = torch.float64
Between = Callable[[], object]
Built = tuple[Any, Tensor, Between]  # params, the loss, and what comes between


def point(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape or (4,), dtype=D, device=device, requires_grad=True)


def nothing() -> None:
    """Change nothing."""


def stepped(device: torch.device) -> Built:
    net = nn.Linear(4, 4).double().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    loss = once(net, point(device, 2, 4)).square().sum()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    return net, loss, optimizer.step


def closure_changed(device: torch.device) -> Built:
    w, x = point(device), torch.ones(4, dtype=D, device=device)
    return w, once(lambda x: (w * x) ** 2, x).sum(), lambda: w.data.mul_(2)


def keyword_changed(device: torch.device) -> Built:
    w, x = point(device), torch.ones(4, dtype=D, device=device)
    loss = once(lambda w, x: (w * x) ** 2, w, x=x).sum()
    return w, loss, lambda: x.mul_(2)


def buffer_written(device: torch.device) -> Built:
    w, b = point(device), torch.zeros(1, dtype=D, device=device)

    def f(h: Tensor) -> Tensor:
        b.add_(1)
        return (w * h * b) ** 2

    return w, once(f, torch.ones(4, dtype=D, device=device)).sum(), nothing


def statistics_changed(device: torch.device) -> Built:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().double().to(device)
    loss = once(net, torch.ones(2, 4, dtype=D, device=device)).square().sum()
    return net, loss, lambda: net.get_buffer("1.running_var").mul_(3)


def of_numpy(device: torch.device) -> Built:
    def f(w: Tensor) -> Tensor:
        return (w * torch.from_numpy(numpy.random.rand(4)).to(device)) ** 2

    w = point(device)
    return w, once(f, w).sum(), nothing


def of_a_generator(device: torch.device) -> Built:
    w, generator = point(device), torch.Generator(device).manual_seed(0)

    def f(w: Tensor) -> Tensor:
        return (w * torch.rand(4, generator=generator, dtype=D, device=device)) ** 2

    return w, once(f, w).sum(), nothing


def of_python(device: torch.device) -> Built:
    w = point(device)
    return w, once(lambda w: (w * random.random()) ** 2, w).sum(), nothing


def masks(device: torch.device) -> Built:
    w = point(device, 100)

    def f(w: Tensor) -> Tensor:
        return torch.where(torch.from_numpy(numpy.random.rand(100) < 0.5).to(device), w, 0.0)

    return w, once(f, w).sum(), nothing


def unfrozen(device: torch.device) -> Built:
    w, v = point(device), point(device)
    w.requires_grad_(False)
    loss = once(lambda v: (v * w).sin(), v).sum()
    return v, loss, lambda: w.requires_grad_()


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * (3 if self.training else 1)).sin()


def to_eval(device: torch.device) -> Built:
    net, w = Noisy(), point(device)
    return w, once(net, w).sum(), net.eval


CASES: dict[Callable[[torch.device], Built], str] = {
    stepped: r"a Linear that gives other values now; .*the parameter 'weight', written",
    closure_changed: r"closure_changed.*line \d+\) that gives other values now",
    keyword_changed: "that gives other values now",
    buffer_written: r"f \(.*that gives other values now; .*a tensor of shape \(1,\), written",
    statistics_changed: r"the buffer '1.running_var', written",
    of_numpy: "gives other values now",
    of_a_generator: "gives other values now",
    of_python: "gives other values now",
    masks: "gives other values now",
    unfrozen: r"a tensor of shape \(4,\), requires_grad_\(\)",
    to_eval: "the module, now in eval mode",
}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
@pytest.mark.parametrize("call", [gradkit.value_and_grads, gradkit.backward_])
def test_other_values_are_refused(
    device: torch.device, build: Callable[[torch.device], Built], call: Callable[..., object]
) -> None:
    with gradkit.checked():
        params, loss, between = build(device)
        with torch.no_grad():
            between()
        with pytest.raises(gradkit.UnsupportedGraphError, match=f"^losses: .*{CASES[build]}"):
            call(loss, params)


@pytest.mark.parametrize("build", [stepped, closure_changed, keyword_changed, unfrozen, to_eval])
def test_before_the_change_they_are_right(
    device: torch.device, build: Callable[[torch.device], Built]
) -> None:
    with gradkit.checked():
        params, loss, _ = build(device)
        at = list(params.parameters()) if isinstance(params, nn.Module) else [params]
        expected = torch.autograd.grad(loss, at, retain_graph=True)
        assert_same_bits(gradkit.value_and_grads(loss, at)[1], expected)


def test_what_changes_given_as_an_argument_is_right(device: torch.device) -> None:
    w = point(device)
    with gradkit.checked():
        noise = torch.from_numpy(numpy.random.rand(4)).to(device)
        loss = once(lambda w, noise: (w * noise) ** 2, w, noise).sum()
        torch.testing.assert_close(gradkit.value_and_grads(loss, w)[1], 2 * w * noise**2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (1,), (37,), (5, 3)])
def test_equal_values_are_equal(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    w = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    with gradkit.checked():
        out = once(lambda w: ((w * w).abs() * w.abs().argsort() * float("inf")).abs(), w)
        expected = torch.autograd.grad(out.sum(), w, retain_graph=True)
        assert_same_bits([gradkit.value_and_grads(out.sum(), w)[1]], expected)


def test_a_pass_of_the_users_own_is_torchs(device: torch.device) -> None:
    with gradkit.checked():
        _, loss, _ = buffer_written(device)
        loss.backward()


def test_only_what_the_pass_unpacks_is_compared(device: torch.device) -> None:
    # The other output is of values that have changed since, and no gradient needs it.
    w, v, x = (point(device) for _ in range(3))
    with gradkit.checked():
        a, b = once(lambda x: (x * w, (x * v).sin()), x)
        with torch.no_grad():
            v.mul_(2)
        assert_same_bits([gradkit.value_and_grads(a.sum(), w)[1]], [x])
        assert b.requires_grad


def test_afterwards_torch_compares_what_it_did(device: torch.device) -> None:
    before = dict(determinism_checks)
    blocks = [gradkit.checked() for _ in range(2)]
    for block in blocks:
        block.__enter__()
    assert determinism_checks != before
    for block in blocks:  # the first ends first
        block.__exit__(None, None, None)
    assert determinism_checks == before
