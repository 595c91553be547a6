"""A model, its losses, and the training loop with `.grad` that gradkit's is held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradkit


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)


def batch_on(device: torch.device) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(2)).to(device)


def losses_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    out = model(x)
    return {"fit": out.square().mean(), "size": out.sin().sum()}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def backward_of(model: nn.Module, *losses: Tensor) -> dict[str, Tensor | None]:
    """Return what `.backward()` of the losses leaves in a fresh `.grad`, and clear it."""
    model.zero_grad()
    torch.autograd.backward(losses)
    grads = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    return grads


def step(optimizer: Any, model: nn.Module, x: Tensor) -> None:
    _, grads = gradkit.value_and_grads(loss_of(model, x), model)
    gradkit.step_(optimizer, model, grads)


def step_by_dot_grad(optimizer: Any, model: nn.Module, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
