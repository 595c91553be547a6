"""Losses of several elements, on nets of several kinds and sizes: what to batch, or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import models
from benchmarks.models import Task

COUNTS = (2, 4, 8, 32, 128)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of net.

    Attributes:
        sizes: Its sizes, small to large.
        make: Makes a task of a size whose loss has so many elements.
        most: The largest number of elements that is worth the time.
    """

    sizes: tuple[int, ...]
    make: Callable[[int, int, torch.device], Task]
    most: int = 128


def _task(model: nn.Module, losses: Callable[[], Tensor]) -> Task:
    return Task(dict(model.named_parameters()), losses)


def _samples(width: int, count: int, device: torch.device) -> Task:
    return models.samples(width, 3, count, device)


def _outputs(width: int, count: int, device: torch.device) -> Task:
    """Return an MLP with a loss for each output, the mean over a batch of 32."""
    model = models.mlp(width, 2, count).to(device)
    return _task(model, lambda: model(torch.randn(32, width, device=device)).square().mean(0))


def _pictures(channels: int, count: int, device: torch.device) -> Task:
    """Return convolutions over 16x16 pictures, with a loss for each picture."""
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * channels, 1),
    ).to(device)
    return _task(model, lambda: model(torch.randn(count, 3, 16, 16, device=device)).square()[:, 0])


def _sequences(width: int, count: int, device: torch.device) -> Task:
    """Return two layers of a transformer over 16 tokens, with a loss for each sequence."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)

    def losses() -> Tensor:
        output: Tensor = model(torch.randn(count, 16, width, device=device))
        return output.square().mean((1, 2))

    return _task(model, losses)


def _recurrent(width: int, count: int, device: torch.device) -> Task:
    """Return ten steps of a GRU cell, with a loss for each sample."""
    model = nn.GRUCell(width, width).to(device)

    def losses() -> Tensor:
        state = torch.zeros(count, width, device=device)
        for x in torch.randn(10, count, width, device=device):
            state = model(x, state)
        return state.square().mean(1)

    return _task(model, losses)


def _residuals(size: int, count: int, device: torch.device) -> Task:
    """Return elementwise functions of one vector, with losses that are means over parts of it."""
    params = {name: torch.randn(size, device=device, requires_grad=True) for name in "abc"}

    def losses() -> Tensor:
        value = params["a"]
        for _ in range(4):
            value = functional.softplus(value * params["b"] + params["c"]).sin()
        return value.view(count, -1).mean(1)

    return Task(params, losses)


KINDS = {
    "MLP, samples": Kind((16, 32, 64, 128, 256, 512), _samples),
    "MLP, outputs": Kind((16, 64, 128, 256, 512), _outputs),
    "CNN, pictures": Kind((4, 16, 64), _pictures, 32),
    "encoder, sequences": Kind((16, 64, 128), _sequences, 32),
    "GRU cell, samples": Kind((16, 64, 256), _recurrent, 32),
    "elementwise": Kind((1 << 8, 1 << 11, 1 << 14, 1 << 17), _residuals, 32),
}


def cases(*, quick: bool) -> Iterator[tuple[str, int, int]]:
    """Yield kinds, sizes and numbers of elements."""
    for name, kind in KINDS.items():
        for size in kind.sizes[:1] if quick else kind.sizes:
            for count in COUNTS[:1] if quick else COUNTS:
                if count <= kind.most:
                    yield name, size, count
