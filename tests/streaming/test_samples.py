"""per_sample_norms and clipped_sum, against the gradients of each sample."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from tests.helpers import unchanged
from tests.streaming.test_gram import close


class Tied(nn.Module):
    """A small model of language, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.mix = nn.Conv1d(4, 4, 2)
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.mix(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        return self.norm(h) @ self.table.weight.T


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def losses_of(kind: str, device: torch.device) -> tuple[Tensor, nn.Module]:
    if kind == "tied":
        model: nn.Module = Tied().double().to(device)
        return model(torch.randint(7, (6, 5), device=device)).square().mean((1, 2)), model
    model = batch_norm().double().to(device)
    return model(torch.randn(6, 5, dtype=torch.float64, device=device)).square().sum(1), model


def rows_of(loss: Tensor, model: nn.Module) -> Tensor:
    rows = gradkit.per_loss_grads(loss, model, retain_graph=True)
    return gradkit.tree.to_matrix([rows], losses=[loss])[0]


@pytest.mark.parametrize("kind", ["tied", "batch_norm"])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_equal_to_the_rows(device: torch.device, kind: str, chunk: int | None) -> None:
    loss, model = losses_of(kind, device)
    matrix = rows_of(loss, model)
    bound = matrix.norm(dim=1).median().item()
    with unchanged(*model.parameters(), loss):
        ours = gradkit.per_sample_norms(loss, model, chunk_size=chunk, retain_graph=True)
        total = gradkit.clipped_sum(loss, model, bound, chunk_size=chunk)
    close(ours, matrix.norm(dim=1))
    factors = (bound / (matrix.norm(dim=1) + 1e-6)).clamp(max=1)
    close(gradkit.tree.to_matrix([total])[0][0], factors @ matrix)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.clipped_sum(loss, model, bound)


def test_an_empty_batch(device: torch.device) -> None:
    model = nn.Linear(3, 1).to(device)
    loss = model(torch.zeros(0, 3, device=device)).sum(1)
    assert gradkit.per_sample_norms(loss, model, retain_graph=True).shape == (0,)
    total = gradkit.clipped_sum(loss, model, 1.0)
    assert all(not grad.count_nonzero() for grad in total.values())


def test_what_is_refused(device: torch.device) -> None:
    loss, model = losses_of("tied", device)
    wrong: list[Any] = [loss.sum(), [loss, loss], loss.view(2, 3)]
    with unchanged(*model.parameters()):
        for bad in wrong:
            with pytest.raises(gradkit.NotScalarLossError, match="one loss for each sample"):
                gradkit.per_sample_norms(bad, model)
            with pytest.raises(gradkit.NotScalarLossError, match="one loss for each sample"):
                gradkit.clipped_sum(bad, model, 1.0)
        for max_norm in (-1.0, "1", None, torch.ones((), device="meta")):
            with pytest.raises(gradkit.OptionError, match="max_norm"):
                gradkit.clipped_sum(loss, model, max_norm)
    gradkit.per_sample_norms(loss, model)  # nothing had run


@pytest.mark.parametrize("max_norm", [10**30, Fraction(1, 3)])
def test_any_number_is_a_largest_norm(device: torch.device, max_norm: Any) -> None:
    loss, model = losses_of("tied", device)
    ours = gradkit.clipped_sum(loss, model, max_norm, retain_graph=True)
    expected = gradkit.clipped_sum(loss, model, float(max_norm))
    assert all(torch.equal(ours[name], grad) for name, grad in expected.items())


def clipped(loss: Tensor, param: Tensor, max_norm: float) -> Tensor:
    """Return the sum of the clipped gradients, of a pass for each sample."""
    total = torch.zeros_like(param, dtype=torch.float64)
    for one in loss:
        grad = torch.autograd.grad(one, param, retain_graph=True)[0].double()
        total += grad * min(1.0, max_norm / (grad.norm().item() + 1e-6))
    return total


class Limited(torch.autograd.Function):
    """The identity, whose backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.1, 0.1)


@pytest.mark.parametrize("kind", ["hook of the param", "hook inside", "Function"])
@pytest.mark.parametrize("chunk", [None, 1])
def test_what_is_not_linear_is_clipped_sample_by_sample(
    device: torch.device, kind: str, chunk: int | None
) -> None:
    w = torch.linspace(-1, 2, 4, dtype=torch.float64, device=device, requires_grad=True)
    h = (Limited.apply(w) if kind == "Function" else w) * torch.arange(1, 21, device=device).view(
        5, 4
    )
    if kind == "hook of the param":
        w.register_hook(torch.sign)
    if kind == "hook inside":
        h.register_hook(lambda grad: grad / grad.norm())
    loss = h.square().sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        (ours,) = gradkit.clipped_sum(loss, [w], 0.3, chunk_size=chunk, retain_graph=True)
    close(ours, clipped(loss, w, 0.3))


@pytest.mark.parametrize("chunk", [None, 1])
def test_an_infinite_gradient_is_not_left_out(device: torch.device, chunk: int | None) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    x = torch.tensor([[1.0, 0.0], [1e20, 1e20]], device=device)
    loss = (x @ w) * torch.tensor([1.0, 1e20], device=device)
    assert gradkit.clipped_sum(loss, [w], 1.0, chunk_size=chunk)[0].isnan().all()


def test_factors_do_not_underflow_in_half_precision(device: torch.device) -> None:
    w = torch.ones(4, device=device, requires_grad=True)
    loss = (torch.arange(1.0, 25.0, device=device).view(6, 4) @ w).half() * 100
    (ours,) = gradkit.clipped_sum(loss, [w], 1e-5, retain_graph=True)
    torch.testing.assert_close(ours.double(), clipped(loss, w, 1e-5), rtol=1e-3, atol=0)
