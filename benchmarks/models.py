"""The models that are differentiated, and how to get fresh losses of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Task:
    """Something to differentiate.

    Attributes:
        params: What by, every one of them reached.
        build: Runs the forward pass on a fresh batch, and returns its losses.
    """

    params: dict[str, Tensor]
    build: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Function:
    """A loss that a function computes.

    Attributes:
        fn: Takes the params and a batch, and returns one loss.
        params: What to differentiate it by: a tree, not of a module.
        build: Returns a fresh batch.
    """

    fn: Callable[[Any, Tensor], Tensor]
    params: list[dict[str, Tensor]]
    build: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Classifier:
    """A module whose loss is differentiated for each sample.

    Attributes:
        module: Returns one score for each of ten classes.
        shape: Of one sample.
        batch: How many samples.
    """

    module: nn.Module
    shape: tuple[int, ...]
    batch: int

    @property
    def params(self) -> dict[str, Tensor]:
        """The module's parameters, without what ties them to it."""
        return {name: param.detach() for name, param in self.module.named_parameters()}

    def build(self) -> tuple[Tensor, Tensor]:
        """Return fresh samples and their classes."""
        like = next(self.module.parameters())
        samples = torch.randn(self.batch, *self.shape, device=like.device, dtype=like.dtype)
        return samples, torch.randint(_CLASSES, (self.batch,), device=like.device)

    def loss(self, params: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        """Return the loss of one sample."""
        scores = functional_call(self.module, params, (sample[None],))
        return functional.cross_entropy(scores, label[None])

    def copy(self, dtype: torch.dtype | None = None) -> Classifier:
        """Return the same with a module of its own, in another dtype if asked for."""
        return replace(self, module=deepcopy(self.module).to(dtype))


_CLASSES = 10


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


def layers(width: int, depth: int, batch: int, device: torch.device) -> Function:
    """Return `depth` layers of one width with tanh after each, as a function of their params."""

    def fn(params: list[dict[str, Tensor]], value: Tensor) -> Tensor:
        for layer in params:
            value = functional.linear(value, layer["weight"], layer["bias"]).tanh()
        return _loss(value)

    linear = [layer for layer in mlp(width, depth).to(device) if isinstance(layer, nn.Linear)]
    params = [{"weight": layer.weight.detach(), "bias": layer.bias.detach()} for layer in linear]
    return Function(fn, params, lambda: torch.randn(batch, width, device=device))


def dense_classifier(width: int, depth: int, batch: int, device: torch.device) -> Classifier:
    """Return an MLP of `depth` layers and a last one."""
    return Classifier(mlp(width, depth, _CLASSES).to(device), (width,), batch)


def convolutional_classifier(
    channels: int, picture: tuple[int, int, int], batch: int, device: torch.device, *, pooled: bool
) -> Classifier:
    """Return two 3x3 convolutions, each of which halves the picture, and a linear layer.

    Args:
        channels: Of the first convolution; the second has twice as many.
        picture: Colours, height and width of a sample.
        batch: Samples.
        device: Where.
        pooled: Whether the linear layer sees the mean over the picture, and has few weights, so
            that activations take more memory than gradients do.

    Returns:
        The classifier.
    """
    colours, height, width = picture
    positions = 1 if pooled else (height // 4) * (width // 4)
    module = nn.Sequential(
        nn.Conv2d(colours, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        *([nn.AdaptiveAvgPool2d(1)] if pooled else []),
        nn.Flatten(),
        nn.Linear(2 * channels * positions, _CLASSES),
    )
    return Classifier(module.to(device), picture, batch)


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
