"""Where add-ons and unusual modules must come out exactly as .backward() leaves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradkit
from tests.helpers import assert_owned, assert_same_bits

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)), (4, 6)),
    "conv_batchnorm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(36, 2),
        ),
        (4, 3, 8, 8),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True), (4, 2, 6)),
    "gru": (lambda: nn.GRU(6, 5, dropout=0.0), (4, 2, 6)),
    "instance_norm": (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 6)),
}  # fmt: skip


def losses_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    return {"square": out.square().mean(), "abs": out.abs().sum().reshape(1)}


@pytest.mark.parametrize("name", MODELS)
def test_joint_and_per_loss_equal_backward(device: torch.device, name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().to(device), torch.randn(shape, device=device)
    losses = losses_of(model, x)
    params = list(model.parameters())

    def by_backward(*chosen: Tensor) -> list[Tensor | None]:
        model.zero_grad()
        torch.autograd.backward(chosen, retain_graph=True)
        found = [p.grad for p in params]
        model.zero_grad()
        return found

    joint = by_backward(*losses.values())
    single = {key: by_backward(loss) for key, loss in losses.items()}
    values, grads = gradkit.value_and_grads(losses, model, retain_graph=True)
    assert list(values) == list(losses)
    assert_owned(grads.values(), params)
    deterministic = device.type == "cpu" or name in ("mlp", "transformer")
    compare = assert_same_bits if deterministic else torch.testing.assert_close
    compare(list(grads.values()), joint)
    per_loss = gradkit.per_loss_grads(losses, model)
    for key, loss in losses.items():
        rows = [g.reshape(p.shape) for g, p in zip(per_loss[key].values(), params, strict=True)]
        compare(rows, single[key])
        assert per_loss[key][next(iter(grads))].shape == loss.shape + params[0].shape


def test_a_non_reentrant_checkpoint_is_exact(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = torch.randn(4, 3, device=device)
    out = checkpoint(model, x, use_reentrant=False)
    losses = [out.square().sum(), out.exp().sum()]
    params = list(model.parameters())
    expected = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    for got, want in zip(
        gradkit.per_loss_grads(losses, model, retain_graph=True), expected, strict=True
    ):
        assert_same_bits(got.values(), want)
    joint = torch.autograd.grad(losses, params, retain_graph=True)
    assert_same_bits(gradkit.value_and_grads(losses, model)[1].values(), joint)


def test_safe_retain_sees_into_a_checkpoint(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = torch.randn(4, 3, device=device)
    with gradkit.safe_retain(model, "1") as kept:
        gradkit.value_and_grads(checkpoint(model, x, use_reentrant=False).sum(), model)
    with gradkit.safe_retain(model, "1") as plain:
        gradkit.value_and_grads(model(x).sum(), model)
    assert_same_bits([kept.grads["1"]], [plain.grads["1"]])


def test_autocast(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    x = torch.randn(4, 6, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = model(x)
        losses = {"a": out.float().square().mean(), "b": out.float().abs().sum()}
    _, grads = gradkit.value_and_grads(losses, model, retain_graph=True)
    assert all(g.dtype == torch.float32 for g in grads.values())
    per_loss = gradkit.per_loss_grads(losses, model, retain_graph=True)
    for loss in losses:
        model.zero_grad()
        losses[loss].backward(retain_graph=True)
        assert_same_bits(per_loss[loss].values(), [p.grad for p in model.parameters()])
    model.zero_grad()
    torch.autograd.backward(list(losses.values()))
    assert_same_bits(grads.values(), [p.grad for p in model.parameters()])


def test_a_scaled_loss_gives_scaled_gradients(device: torch.device) -> None:
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    w = torch.randn(3, device=device, requires_grad=True)
    _, grad = gradkit.value_and_grads(scaler.scale((w * w).sum()), w)
    assert torch.equal(grad, 16 * w.detach())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_aot_compiled_forward_in_sequential_mode(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(5, 3, device=device)
    out = compiled(x)
    params = list(model.parameters())
    losses = [out.square().sum(), out.exp().sum()]
    expected = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    for got, want in zip(
        gradkit.per_loss_grads(losses, params, retain_graph=True), expected, strict=True
    ):
        assert_same_bits(got, want)
    rows = [torch.autograd.grad(row, params, retain_graph=True) for row in out.sum(1)]
    vector = out.sum(1)
    with pytest.warns(gradkit.GradkitWarning, match="torch.compile"):
        batched = gradkit.per_loss_grads(vector, params, strategy="batched")
    for index, row in enumerate(rows):
        assert_same_bits([g[index] for g in batched], row)


def test_tied_weights(device: torch.device) -> None:
    table, head = nn.Embedding(7, 4).to(device), nn.Linear(4, 7, bias=False).to(device)
    head.weight = table.weight
    loss = head(table(torch.tensor([1, 2, 2], device=device))).logsumexp(1).sum()
    _, grads = gradkit.value_and_grads(loss, {"in": table, "out": head}, retain_graph=True)
    loss.backward()
    assert_same_bits([grads["in"]["weight"], grads["out"]["weight"]], [table.weight.grad] * 2)
    assert grads["in"]["weight"] is not grads["out"]["weight"]
