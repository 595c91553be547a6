"""per_loss_grads of a vector of losses whose samples are independent: one pass for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit._autograd import passes, sample_pass
from gradkit._core import user_code
from tests.helpers import unchanged


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the losses whose gradients have been taken so."""
    monkeypatch.setattr(user_code, "hooks_registered", lambda: False)  # by other tests
    losses: list[int] = []

    def noted(call: Any, index: int, *args: Any, **options: Any) -> Any:
        losses.append(index)
        return sample_pass.run_samples(call, index, *args, **options)

    monkeypatch.setattr(passes, "run_samples", noted)
    return losses


def convolutional(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)
    return nn.Sequential(*layers).to(device, torch.float64)


def losses_of(model: nn.Module, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64)
    loss: Tensor = model(x.to(next(model.parameters()).device)).square().sum(1)
    return loss


@pytest.mark.parametrize("strategy", ["batched", "auto"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_pass_gives_what_a_pass_for_each_gives(
    device: torch.device, in_one_pass: list[int], strategy: Any, memory_format: torch.memory_format
) -> None:
    model = convolutional(device).to(memory_format=memory_format)
    loss = losses_of(model)
    expected = gradkit.per_loss_grads(loss, model, retain_graph=True)
    grads = gradkit.per_loss_grads(loss, model, strategy=strategy)
    assert in_one_pass == [0]
    torch.testing.assert_close(grads, expected)
    assert [g.stride() for g in grads.values()] == [g.stride() for g in expected.values()]
    assert not any(grad.requires_grad for grad in grads.values())
    assert len({grad.untyped_storage().data_ptr() for grad in grads.values()}) == len(grads)
    for grad in grads.values():
        grad.zero_()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.per_loss_grads(loss, model)


def test_the_graph_is_kept_if_asked_for(device: torch.device, in_one_pass: list[int]) -> None:
    model = convolutional(device)
    loss = losses_of(model)
    first = gradkit.per_loss_grads(loss, model, strategy="auto", retain_graph=True)
    torch.testing.assert_close(gradkit.per_loss_grads(loss, model, strategy="auto"), first)
    assert in_one_pass == [0, 0]


def test_a_tree_of_losses_of_several_shapes(device: torch.device, in_one_pass: list[int]) -> None:
    model = convolutional(device)

    def losses() -> dict[str, Tensor]:
        each = losses_of(model)
        return {"sum": each.sum(), "vector": each, "half": 0.5 * each, "one": each[:1]}

    expected = gradkit.per_loss_grads(losses(), model)
    grads = gradkit.per_loss_grads(losses(), model, strategy="batched")
    torch.testing.assert_close(grads, expected)
    assert in_one_pass == [1, 2]
    assert (
        gradkit.per_loss_grads(losses_of(model)[:0], model, strategy="batched")["0.bias"].shape[0]
        == 0
    )


@pytest.mark.parametrize("unused", ["none", "zeros"])
def test_parameters_that_are_tied_frozen_or_unused(
    device: torch.device, in_one_pass: list[int], unused: Any
) -> None:
    torch.manual_seed(0)
    table, linear, spare = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(2, 2)
    model = nn.ModuleList([table, linear, spare]).to(device, torch.float64)
    linear.bias.requires_grad_(False)
    words = torch.tensor([[1, 2], [2, 2], [0, 6], [3, 1], [4, 4]], device=device)
    options: Any = {"unused": unused, "retain_graph": True}
    loss = (linear(table(words)) @ table.weight.T).logsumexp(2).sum(1)
    expected = gradkit.per_loss_grads(loss, model, **options)
    grads = gradkit.per_loss_grads(loss, model, strategy="auto", **options)
    assert in_one_pass == [0]
    assert [g is None for g in grads.values()] == [g is None for g in expected.values()]
    torch.testing.assert_close(
        [g for g in grads.values() if g is not None],
        [g for g in expected.values() if g is not None],
    )


def twice(grad: Tensor) -> Tensor:
    return 2 * grad


@pytest.mark.filterwarnings("ignore::gradkit.GradkitWarning")
@pytest.mark.parametrize(
    "case",
    ["few", "mixed", "graph", "sparse", "half", "hook", "retained", "checked", "observed", "dtype"],
)
def test_what_is_not_proved_or_is_watched_takes_the_usual_passes(
    device: torch.device, in_one_pass: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model = convolutional(device)
    table = nn.Embedding(4, 2, sparse=True).to(device, torch.float64)
    params: Any = {"model": model, "table": table.weight}
    options: Any = {"unused": "zeros", "retain_graph": True}
    if case == "half":
        params, options = {"model": model.bfloat16()}, {"retain_graph": True}
        loss = model(torch.ones(6, 2, 5, 5, device=device, dtype=torch.bfloat16)).sum(1)
    else:
        loss = losses_of(model, 3 if case == "few" else 6)
    if case == "mixed":
        loss = loss - loss.mean()
    if case == "sparse":
        loss = loss + table(torch.arange(6, device=device) % 4).sum(1)
    if case == "hook":
        monkeypatch.undo()
        hidden = loss.sqrt()
        hidden.register_hook(twice)
        loss = hidden.square()
    if case == "dtype":
        model[4].bias.grad_dtype = torch.float32
    if case == "retained":
        loss.retain_grad()
    if case == "graph":
        options["create_graph"] = True
    expected = gradkit.per_loss_grads(loss, params, **options)
    if case == "checked":
        with gradkit.checked():
            grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    elif case == "observed":
        with gradkit.safe_retain(loss):
            grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    else:
        grads = gradkit.per_loss_grads(loss, params, strategy="auto", **options)
    assert in_one_pass == []
    tolerance = {"rtol": 0.1, "atol": 0.1} if case == "half" else {}
    dense = [gradkit.tree.map(Tensor.to_dense, each) for each in (grads, expected)]
    torch.testing.assert_close(*dense, **tolerance)


def test_a_gradient_that_is_not_finite_reaches_no_other_sample(
    device: torch.device, in_one_pass: list[int]
) -> None:
    """In a pass for one element, torch multiplies the cotangents of all others, zeros, by inf."""
    w = torch.zeros(2, device=device, requires_grad=True)
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [0.0, 3.0]], device=device)
    for fn in (torch.sqrt, torch.abs, torch.reciprocal, torch.log):
        expected = gradkit.func.per_sample_grads(lambda w, x, fn=fn: fn(x @ w))(w, x)
        with unchanged(w):
            grads = gradkit.per_loss_grads(fn(x @ w), w, strategy="batched")
        torch.testing.assert_close(grads, expected, equal_nan=True)
    assert in_one_pass == [0] * 4
