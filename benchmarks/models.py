"""The models that are differentiated, and how to get fresh losses of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Task:
    """Something to differentiate.

    Attributes:
        params: What by, every one of them reached.
        build: Runs the forward pass on a fresh batch, and returns its losses.
    """

    params: dict[str, Tensor]
    build: Callable[[], Any]


def mlp(width: int, depth: int, outputs: int | None = None) -> nn.Sequential:
    """Return `depth` layers of one width with tanh between them, and a last layer if asked for."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    if outputs is not None:
        layers.append(nn.Linear(width, outputs))
    return nn.Sequential(*layers)


def deep(width: int, depth: int, batch: int, device: torch.device) -> Task:
    """Return an MLP of `2 * depth` params with one loss."""
    model = mlp(width, depth).to(device)

    def build() -> Tensor:
        return _loss(model(torch.randn(batch, width, device=device)))

    return Task(dict(model.named_parameters()), build)


def convolutional(channels: int, depth: int, batch: int, device: torch.device) -> Task:
    """Return 3x3 convolutions over 32x32 pictures, with batch norms between, and one loss."""
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1))
    for _ in range(depth):
        model.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()))
        model.append(nn.Conv2d(channels, channels, 3, padding=1))
    model.to(device)

    def build() -> Tensor:
        return _loss(model(torch.randn(batch, 3, 32, 32, device=device)))

    return Task(dict(model.named_parameters()), build)


def product(leaves: int, device: torch.device) -> Task:
    """Return a product of small vectors: a graph that costs next to nothing but its nodes."""
    params = {
        f"p{index}": torch.ones(16, device=device, requires_grad=True) for index in range(leaves)
    }

    def build() -> Tensor:
        value = torch.rand(16, device=device)
        for param in params.values():
            value = value * param
        return value.sum()

    return Task(params, build)


def heads(
    width: int, depth: int, batch: int, count: int, device: torch.device, *, shared: bool = False
) -> Task:
    """Return `count` linear heads on one trunk, with a list of losses, one a head.

    Args:
        width: Of every layer of the trunk.
        depth: Layers of the trunk.
        batch: Samples.
        count: Heads.
        device: Where.
        shared: Differentiate by the trunk alone, which all losses reach.

    Returns:
        The task.
    """
    trunk = mlp(width, depth).to(device)
    tops = nn.ModuleList(nn.Linear(width, 1) for _ in range(count)).to(device)

    def build() -> list[Tensor]:
        features = trunk(torch.randn(batch, width, device=device))
        return [_loss(top(features)) for top in tops]

    whole: nn.Module = trunk if shared else nn.ModuleDict({"trunk": trunk, "heads": tops})
    return Task(dict(whole.named_parameters()), build)


def samples(width: int, depth: int, count: int, device: torch.device) -> Task:
    """Return an MLP with a vector of losses, one for each of `count` samples."""
    model = mlp(width, depth, 1).to(device)

    def build() -> Tensor:
        output: Tensor = model(torch.randn(count, width, device=device))
        return output.square().squeeze(1)

    return Task(dict(model.named_parameters()), build)


def staged(model: Iterable[nn.Module], batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a model on a batch, and what each of its tanh layers put out."""
    kept: list[Tensor] = []
    value = batch
    for layer in model:
        value = layer(value)
        if isinstance(layer, nn.Tanh):
            kept.append(value)
    return _loss(value), kept


def _loss(output: Tensor) -> Tensor:
    return (output - 1).square().mean()
