"""The networks of a training step, from two tensors to a step of some milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Net:
    """A network and its batch.

    Attributes:
        make: Makes the network.
        shape: Of a batch.
        limit: The largest ratio allowed for a step.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    limit: float

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the loss of a network on a batch."""
        output: Tensor = model(batch)
        return output.square().mean()

    def batch(self, device: torch.device) -> Tensor:
        """Return a fresh batch."""
        return torch.randn(self.shape, device=device)


def _linears(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _mlp() -> nn.Module:
    layers = [(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*(part for pair in layers for part in pair))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


NETS = {
    "1 linear layer, 2 tensors": Net(lambda: _linears(1, 4), (2, 4), 1.20),
    "10 linear layers 64 wide": Net(lambda: _linears(10, 64), (32, 64), 1.08),
    "100 linear layers 16 wide": Net(lambda: _linears(100, 16), (8, 16), 1.12),
    "MLP, 4 layers 512 wide": Net(_mlp, (64, 512), 1.05),
    "encoder, 4 layers 128 wide": Net(_encoder, (8, 32, 128), 1.03),
}
