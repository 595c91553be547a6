"""per_loss_grads(strategy="batched"): the same gradients, or a sequential pass and one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit._autograd.passes import PassRunner
from tests.helpers import assert_same_bits, unchanged


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each engine pass: 1 for an ordinary one."""
    seen: list[int] = []
    ordinary, batch = PassRunner.grads, PassRunner.batched_grads

    def count_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ordinary(self, *args, **kwargs)

    def count_batch(self: Any, output: Tensor, seeds: Tensor, variables: Any) -> Any:
        seen.append(len(seeds))
        return batch(self, output, seeds, variables)

    monkeypatch.setattr(PassRunner, "grads", count_one)
    monkeypatch.setattr(PassRunner, "batched_grads", count_batch)
    return seen


def both(loss: Tensor, params: Any, **kwargs: Any) -> tuple[Any, Any]:
    sequential = gradkit.per_loss_grads(loss, params, retain_graph=True)
    return sequential, gradkit.per_loss_grads(loss, params, strategy="batched", **kwargs)


def test_chunks(device: torch.device, passes: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    x = torch.randn(7, 3, device=device)
    for kwargs, expected in (
        ({}, [6, 1]),  # the last row has a pass of its own, which frees the graph
        ({"chunk_size": 4}, [4, 2, 1]),
        ({"chunk_size": 100}, [6, 1]),
        ({"chunk_size": 1, "retain_graph": True}, [1] * 7),
        ({"retain_graph": True}, [7]),
    ):
        loss = model(x).square().sum(1).flip(0)  # not proved to be of independent samples
        sequential = gradkit.per_loss_grads(loss, model, retain_graph=True)
        passes.clear()
        batched = gradkit.per_loss_grads(loss, model, strategy="batched", **kwargs)
        assert passes == expected
        for name in sequential:
            torch.testing.assert_close(batched[name], sequential[name])
            assert batched[name].shape == sequential[name].shape


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU()),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2)),
    ],
)
def test_layers(device: torch.device, make: Callable[[], nn.Module]) -> None:
    model = make().to(device)
    loss = model(torch.randn(4, 6, device=device)).square().flatten(1).sum(1)
    sequential, batched = both(loss, model)
    for name in sequential:
        torch.testing.assert_close(batched[name], sequential[name], rtol=1e-4, atol=1e-5)


def one_warning(call: Callable[[], Any]) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    assert [w.category for w in caught] == [gradkit.GradkitWarning]
    assert caught[0].filename == __file__
    return result, str(caught[0].message)


class Item(torch.autograd.Function):
    """A backward that reads a number, which no batched tensor can give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 if grad.sum().item() > -1e9 else 0)


def as_strided_scatter(w: Tensor) -> Tensor:
    return torch.as_strided_scatter(w * 2, w[:2] * w[2:4], (2,), (1,), 1)


FALLBACKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "as_strided_scatter": (as_strided_scatter, "as_strided_scatter"),
    "custom Function": (Item.apply, "Item"),
    "two reasons": (lambda w: Item.apply(as_strided_scatter(w)), "as_strided_scatter"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_is_known_to_be_wrong_or_to_fail_is_done_sequentially(
    device: torch.device, passes: list[int], name: str
) -> None:
    fn, reason = FALLBACKS[name]
    w = torch.randn(5, device=device, requires_grad=True)
    loss = fn(w)
    expected = gradkit.per_loss_grads(loss, w, retain_graph=True)
    passes.clear()
    got, words = one_warning(lambda: gradkit.per_loss_grads(loss, w, strategy="batched"))
    assert reason in words
    assert_same_bits([got], [expected])
    assert passes == [1] * 5  # refused up front: no batched pass was tried
    quiet = gradkit.per_loss_grads(fn(w), w, strategy="auto")
    assert_same_bits([quiet], [expected])


def test_torch_is_wrong_where_we_fall_back(device: torch.device) -> None:
    """If this fails, torch has mended it, and the fallback can go [G1].

    It is wrong in ordinary passes, too: tests/silently_wrong/unseen.py.
    """
    w = torch.randn(5, device=device, requires_grad=True)
    eye = torch.eye(5, device=device)
    (batched,) = torch.autograd.grad(as_strided_scatter(w), w, eye, is_grads_batched=True)
    in_other_words = torch.cat([w[:1] * 2, w[:2] * w[2:4], w[3:] * 2])
    (right,) = torch.autograd.grad(in_other_words, w, eye, is_grads_batched=True)
    assert torch.equal(in_other_words, as_strided_scatter(w))
    assert not torch.allclose(batched, right)


def test_a_failure_on_the_way_is_followed_by_sequential_passes(device: torch.device) -> None:
    w = torch.randn(4, device=device, requires_grad=True)
    h = w * 2
    h.register_hook(lambda grad: grad * (1 if grad.sum().item() > -1e9 else 0))
    loss = h * h
    expected = gradkit.per_loss_grads(loss, w, retain_graph=True)
    w.grad = torch.ones_like(w)
    with unchanged(w):
        got, words = one_warning(lambda: gradkit.per_loss_grads(loss, w, strategy="batched"))
    assert "a hook computes with the gradient" in words
    assert_same_bits([got], [expected])


@pytest.mark.parametrize(
    "hook",
    [
        lambda grad: grad / grad.data.norm(),  # would crash the process
        lambda grad: grad / grad.std(),  # would be another number
        lambda grad: grad * 2,
    ],
)
def test_hooks_see_one_gradient_at_a_time(device: torch.device, hook: Any) -> None:
    w = torch.randn(4, device=device, requires_grad=True)
    h = w * 2
    h.register_hook(hook)
    loss = h * h.sum()
    expected = gradkit.per_loss_grads(loss, w, retain_graph=True)
    got, words = one_warning(lambda: gradkit.per_loss_grads(loss, w, strategy="batched"))
    assert "a hook computes with the gradient" in words
    assert_same_bits([got], [expected])


def test_a_sparse_gradient(device: torch.device) -> None:
    table = nn.Embedding(6, 2, sparse=True).to(device)
    loss = table(torch.tensor([1, 1, 3], device=device)).square().sum(1)
    got, words = one_warning(lambda: gradkit.per_loss_grads(loss, table, strategy="batched"))
    assert "sparse" in words
    dense = nn.Embedding.from_pretrained(table.weight.detach(), freeze=False)
    want = gradkit.per_loss_grads(
        dense(torch.tensor([1, 1, 3], device=device)).square().sum(1), dense
    )
    assert got["weight"].is_sparse
    torch.testing.assert_close(got["weight"].to_dense(), want["weight"])


def test_non_leaf_params_and_safe_retain(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    y = w * 2
    y.register_hook(lambda grad: grad * 10)
    loss = y * y
    got, words = one_warning(
        lambda: gradkit.per_loss_grads(
            loss, {"y": y, "w": w}, strategy="batched", retain_graph=True
        )
    )
    assert "leaf" in words
    torch.testing.assert_close(got["y"], torch.diag(20 * y.detach()))
    retained = y * 2
    retained.retain_grad()
    with unchanged(w, retained):
        _, words = one_warning(
            lambda: gradkit.per_loss_grads(retained, w, strategy="batched", retain_graph=True)
        )
    assert "leaf" in words
    with gradkit.safe_retain(y) as kept:
        _, words = one_warning(lambda: gradkit.per_loss_grads(loss, w, strategy="batched"))
    assert "safe_retain" in words
    assert len(kept.passes) == 3


def test_scalar_losses_are_not_batched_with_each_other(
    device: torch.device, passes: list[int]
) -> None:
    w = torch.zeros(2, device=device, requires_grad=True)
    losses = {"inf": w.sqrt().sum(), "fine": (w + 1).square().sum()}
    got, words = one_warning(lambda: gradkit.per_loss_grads(losses, w, strategy="batched"))
    assert "batch of one" in words
    assert got["fine"].tolist() == [2, 2]
    mixed = {"one": w.sum(), "many": (w + 1) ** 2}
    passes.clear()
    gradkit.per_loss_grads(mixed, w, strategy="batched")  # no warning: there was something to batch
    assert passes == [1, 1, 1]


def test_a_warning_that_is_an_error_comes_before_anything_ran(device: torch.device) -> None:
    w = torch.randn(5, device=device, requires_grad=True)
    loss = as_strided_scatter(w)
    with unchanged(w, loss), pytest.raises(gradkit.GradkitWarning):
        gradkit.per_loss_grads(loss, w, strategy="batched")
    gradkit.per_loss_grads(loss, w)


@pytest.mark.parametrize(("width", "batch"), [(4, True), (40_000, False)])
def test_auto_batches_small_work(
    device: torch.device, passes: list[int], width: int, batch: bool
) -> None:
    if device.type != "cpu":
        pytest.skip("the bound for CUDA is another one")
    layer = nn.Linear(width, 6).to(device)
    loss = layer(torch.randn(width, device=device))
    gradkit.per_loss_grads(loss, layer, strategy="auto")
    assert passes == ([5, 1] if batch else [1] * 6)


def test_unused_params_stay_none_and_zeros_have_the_right_shape(device: torch.device) -> None:
    w, v = (torch.randn(3, 2, device=device).t().requires_grad_() for _ in range(2))
    loss = (w * w).sum(0)
    for strategy in ("sequential", "batched"):
        got = gradkit.per_loss_grads(loss, [w, v], strategy=strategy, retain_graph=True)
        assert got[1] is None
        got = gradkit.per_loss_grads(
            loss, [w, v], strategy=strategy, unused="zeros", retain_graph=True
        )
        assert torch.equal(got[1], torch.zeros(3, 2, 3, device=device))
        assert got[1].stride()[1:] == v.stride()
