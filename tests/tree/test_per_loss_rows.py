"""What stands for the gradients of several losses: those of one call are not taken for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradkit
from gradkit import tree

CONSUMERS: dict[str, Callable[..., Any]] = {
    "conflicts": gradkit.report.conflicts,
    "combine": lambda grads, **more: gradkit.combine(grads, lambda matrix: matrix.sum(0), **more),
    "combine by weights": lambda grads, **more: gradkit.combine(grads, 1.0, **more),
    "gram": tree.gram,
    "to_matrix": tree.to_matrix,
    "weighted_sum": tree.weighted_sum,
}
WITHOUT_BIAS = (nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
MODULES: dict[str, nn.Module] = {
    "layers without bias": nn.Sequential(*WITHOUT_BIAS),
    "a lone layer": nn.Linear(4, 4, bias=False),
    "a norm": nn.LayerNorm(4),
    "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)),
    "a recurrent cell": nn.RNNCell(4, 4, bias=False),
    "norms of several kinds": nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4)),
    "of several shapes": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_gradient_of_one_call_is_refused(
    device: torch.device, name: str, consumer: str
) -> None:
    module = MODULES[name].to(device)
    x = torch.randn(8, 4, device=device)
    losses = {"fit": module(x).square().mean(), "size": module(x).abs().sum()}
    _, grads = gradkit.value_and_grads(losses, module, retain_graph=True)
    with pytest.raises(gradkit.StructureError, match=r"per_loss.*the name of a param") as caught:
        CONSUMERS[consumer](grads)
    assert "gradkit.per_loss_grads(losses, params)" in str(caught.value)
    CONSUMERS[consumer](gradkit.per_loss_grads(losses, module))  # as it says


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_that_of_parameters_in_order_is_refused(device: torch.device, consumer: str) -> None:
    module = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for params in (module.parameters(), optimizer, {"w": module.weight, "b": module.bias}):
        loss = module(torch.ones(2, 4, device=device)).square().sum()
        _, grads = gradkit.value_and_grads(loss, params)
        with pytest.raises(gradkit.StructureError, match=r"one shape(?s:.*)per_loss_grads"):
            CONSUMERS[consumer](grads)


def test_that_of_parts_with_other_parameters_is_refused(device: torch.device) -> None:
    parts = {"G": nn.Linear(4, 4).to(device), "D": nn.Linear(4, 4, bias=False).to(device)}
    loss = parts["D"](parts["G"](torch.ones(2, 4, device=device))).square().sum()
    for params in (parts, list(parts.values()), {"G": parts["G"], "w": parts["D"].weight}):
        _, grads = gradkit.value_and_grads(loss, params, retain_graph=True)
        with pytest.raises(gradkit.GradkitError, match=r"gradkit\.per_loss_grads"):
            tree.gram(grads)


words = st.sampled_from(
    ["fit", "ce", "l1", "loss", "aux", "weight_decay", "kl", "task", "depth", "seg", "bias_term",
     "weights", "reg", "0", "G", "weight_penalty", "unbiased", "train", "a b", "η"]
)  # fmt: skip
separators = st.sampled_from(["_", ".", "/", "-", ":", ""])
usual_names = st.builds(lambda a, by, b: f"{a}{by}{b}", words, separators, words) | words
shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def rows_of(names: list[str], shape: tuple[int, ...], device: torch.device) -> tuple[Any, Any]:
    """Return losses, and their gradients with respect to one tensor."""
    w = torch.randn(shape, device=device, requires_grad=True)
    losses = {name: (w * (index + 1)).sum() for index, name in enumerate(names)}
    return losses, gradkit.per_loss_grads(losses, w)


@given(names=st.lists(usual_names, min_size=1, max_size=4, unique=True), shape=shapes)
def test_gradients_with_respect_to_one_tensor_are_rows(
    device: torch.device, names: list[str], shape: tuple[int, ...]
) -> None:
    _, per_loss = rows_of(names, shape, device)
    matrix = torch.stack([row.flatten() for row in per_loss.values()])
    assert torch.equal(tree.to_matrix(per_loss)[0], matrix)
    for consumer in CONSUMERS.values():
        consumer(per_loss)


names_of_parameters = st.sampled_from([
    "weight",
    "bias",
    "0.weight",
    "layers.1.bias",
    "in_proj_weight",
])


@given(
    names=st.lists(usual_names | names_of_parameters | st.text(), min_size=1, unique=True),
    shape=shapes,
)
def test_with_the_losses_nothing_is_guessed(
    device: torch.device, names: list[str], shape: tuple[int, ...]
) -> None:
    losses, per_loss = rows_of(names, shape, device)
    matrix = torch.stack([row.flatten() for row in per_loss.values()])
    assert torch.equal(tree.to_matrix(per_loss, losses=losses)[0], matrix)
    for consumer in CONSUMERS.values():
        consumer(per_loss, losses=losses)


@given(names=st.lists(names_of_parameters, min_size=1, unique=True))
def test_trees_below_such_names_are_of_losses(device: torch.device, names: list[str]) -> None:
    """A penalty for each parameter: no gradient has a tree in the place of a parameter."""
    w = {name: torch.ones(2, device=device, requires_grad=True) for name in names}
    per_loss = gradkit.per_loss_grads({name: w[name].sum() for name in names}, w)
    assert torch.equal(tree.gram(per_loss), 2 * torch.eye(len(names), device=device))
