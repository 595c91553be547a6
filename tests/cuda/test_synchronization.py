"""No call waits for the device: what CUDA does is queued, and the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradkit
from gradkit import tree
from tests.cuda.training import batch_on, loss_of, losses_of, model_on, step

# torch says so when the mode is first set.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every call that torch knows to wait for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def joint(model: nn.Module, x: Tensor) -> None:
    gradkit.value_and_grads(losses_of(model, x), model, weights={"fit": 1.0, "size": 0.1})


def sequential(model: nn.Module, x: Tensor) -> None:
    gradkit.per_loss_grads(losses_of(model, x), model, strategy="sequential")


def batched(model: nn.Module, x: Tensor) -> None:
    gradkit.per_loss_grads(model(x).square().mean(1), model, strategy="batched")


def added(model: nn.Module, x: Tensor) -> None:
    _, grads = gradkit.value_and_grads(loss_of(model, x), model)
    gradkit.add_grads_(model, grads)
    gradkit.add_grads_(model, grads)


def functional(model: nn.Module, x: Tensor) -> None:
    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, x).square().mean()

    gradkit.func.value_and_grads(loss_fn)(dict(model.named_parameters()))


CALLS = {
    "value_and_grads": joint,
    "per_loss_grads, sequential": sequential,
    "per_loss_grads, batched": batched,
    "add_grads_": added,
    "func.value_and_grads": functional,
}


def test_the_mode_sees_a_call_that_waits(device: torch.device) -> None:
    x = torch.ones((), device=device)
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        x.item()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_queued(device: torch.device, name: str) -> None:
    model, x = model_on(device), batch_on(device)
    CALLS[name](model, x)  # the first call loads kernels and makes handles
    with no_waiting():
        CALLS[name](model, x)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_is_queued(device: torch.device, kind: Any) -> None:
    model, x = model_on(device), batch_on(device)
    optimizer = kind(model.parameters(), lr=0.1)
    step(optimizer, model, x)
    with no_waiting():
        step(optimizer, model, x)


TREES: dict[str, Callable[[Any, Any], object]] = {
    "add": tree.add,
    "sub": tree.sub,
    "scale": lambda a, _: tree.scale(a, 0.5),
    "dot": tree.dot,
    "global_norm": lambda a, _: tree.global_norm(a),
    "cosine": tree.cosine,
    "clip_by_global_norm": lambda a, _: tree.clip_by_global_norm(a, 1.0),
    "weighted_sum": lambda a, b: tree.weighted_sum({"a": a, "b": b}, {"a": 1.0, "b": 0.5}),
    "to_matrix": lambda a, b: tree.to_matrix({"a": a, "b": b}),
    "gram": lambda a, b: tree.gram({"a": a, "b": b}),
    "gram, a leaf that one misses": lambda a, b: tree.gram({"a": a, "b": {**b, "0.bias": None}}),
    "stack": lambda a, b: tree.unstack(tree.stack([a, b])),
}


@pytest.mark.parametrize("name", TREES)
def test_arithmetic_of_trees_is_queued(device: torch.device, name: str) -> None:
    model, x = model_on(device), batch_on(device)
    per_loss = gradkit.per_loss_grads(losses_of(model, x), model)
    TREES[name](per_loss["fit"], per_loss["size"])
    with no_waiting():
        TREES[name](per_loss["fit"], per_loss["size"])


@pytest.mark.parametrize("make", [gradkit.meta.sgd, gradkit.meta.adam])
def test_an_inner_loop_is_queued(device: torch.device, make: Any) -> None:
    """With steps that are stored: with recomputed ones the host waits once, at the pass's end."""
    opt = make(lr=0.1)
    model, x = model_on(device), batch_on(device)
    params = dict(model.named_parameters())

    def loss_fn(params: dict[str, Tensor], outer: object, x: Tensor) -> Tensor:
        return functional_call(model, params, x).square().mean()

    def meta_gradient() -> None:
        adapted = gradkit.meta.unroll(loss_fn, params, [x, x], opt)
        gradkit.value_and_grads(loss_fn(adapted.params, (), x), params)

    meta_gradient()
    with no_waiting():
        meta_gradient()
