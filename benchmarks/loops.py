"""The inner loops that are differentiated, and the models that they adapt."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks import models

Pair: TypeAlias = tuple[Tensor, Tensor]
RATE = 0.5  # of the steps of every loop


@dataclass(frozen=True, slots=True)
class Course:
    """What an inner loop reads.

    Attributes:
        weights: Of the samples of each batch, before a sigmoid; they are meta-learned.
        batches: Samples and targets, for each step.
        query: The same, for the loss after the steps.
    """

    weights: Tensor
    batches: list[Pair]
    query: Pair


@dataclass(frozen=True, slots=True)
class Loop:
    """Steps of gradient descent on a loss that weighs its samples, and a loss after them.

    Attributes:
        module: What is adapted; its parameters are where the steps begin, and meta-learned.
        shape: Of one sample, and of what the module makes of it.
        batch: Samples of a step.
        steps: How many there are.
    """

    module: nn.Module
    shape: tuple[int, ...]
    batch: int
    steps: int

    @property
    def params(self) -> dict[str, Tensor]:
        """The module's parameters."""
        return dict(self.module.named_parameters())

    def build(self) -> Course:
        """Return fresh data."""
        like = next(self.module.parameters())
        weights = torch.zeros(self.batch, device=like.device, dtype=like.dtype, requires_grad=True)
        return Course(weights, [self._pair(like) for _ in range(self.steps)], self._pair(like))

    def _pair(self, like: Tensor) -> Pair:
        shape = (2, self.batch, *self.shape)
        samples, targets = torch.randn(shape, device=like.device, dtype=like.dtype)
        return samples, targets

    def apply(self, params: dict[str, Tensor], samples: Tensor) -> Tensor:
        """Return what the module makes of samples with other parameters."""
        output: Tensor = functional_call(self.module, params, (samples,))
        return output

    def copy(self, dtype: torch.dtype | None = None, batch: int | None = None) -> Loop:
        """Return the same with a module of its own, in another dtype or batch if asked for."""
        module = deepcopy(self.module).to(dtype)
        return replace(self, module=module, batch=batch or self.batch)


def inner_loss(output: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of a step."""
    return (weights.sigmoid() * (output - targets).square().flatten(1).mean(1)).mean()


def query_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the loss after the steps."""
    return (output - targets).square().mean()


def dense(width: int, depth: int, batch: int, steps: int, device: torch.device) -> Loop:
    """Return the loop of an MLP of `depth` layers of one width with tanh between them."""
    return Loop(models.mlp(width, depth - 1, width).to(device), (width,), batch, steps)


def encoder(
    width: int, heads: int, tokens: int, batch: int, steps: int, device: torch.device
) -> Loop:
    """Return the loop of one layer of a transformer."""
    return Loop(Encoder(width, heads).to(device), (tokens, width), batch, steps)


class Attention(nn.Module):
    """Self-attention, written out: torch's fused one has no second derivative."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.heads = heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mixed tokens."""
        batch, length, width = tokens.shape
        parts = self.inward(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
        result: Tensor = self.outward(mixed)
        return result


class Encoder(nn.Module):
    """A layer of a transformer, its norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        wider = 4 * width
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, wider), nn.GELU(), nn.Linear(wider, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after the layer."""
        tokens = tokens + self.attention(tokens)
        result: Tensor = tokens + self.dense(tokens)
        return result
