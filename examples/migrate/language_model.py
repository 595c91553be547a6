"""A language model of characters: an LSTM with tied weights, trained on Python's own sources.

    python examples/migrate/language_model.py [--smoke] [--device cuda]

The embedding is also the output layer. Back-propagation through time is truncated: the state goes
on from window to window, the gradient does not. `legacy` and `functional` are the same loop, line
by line. The weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from side_by_side import parse, reproducible, verdict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

import gradkit

MAX_NORM = 0.5
LEARNING_RATE = 4e-3

State: TypeAlias = tuple[Tensor, Tensor]
Window: TypeAlias = tuple[Tensor, Tensor]  # characters [T, B], and the ones that follow
Loop: TypeAlias = Callable[["LanguageModel", Sequence[Window]], list[float]]


class LanguageModel(nn.Module):
    """Logits of the next character; the embedding and the output layer share a matrix."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width)
        self.head = nn.Linear(width, characters)
        nn.init.normal_(self.head.weight, std=0.1)
        self.embedding.weight = self.head.weight

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return logits of shape [T, B, characters], and the state after the window."""
        out, state = self.lstm(self.embedding(x), state)
        return self.head(out), state


def legacy(model: LanguageModel, windows: Sequence[Window]) -> list[float]:
    """Train through `.grad`, and return the losses."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    state = None
    losses = []
    for x, y in windows:
        optimizer.zero_grad()
        logits, (h, c) = model(x, state)
        state = h.detach(), c.detach()
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def functional(model: LanguageModel, windows: Sequence[Window]) -> list[float]:
    """Train with gradients as values, and return the losses."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    state = None
    losses = []
    for x, y in windows:
        logits, (h, c) = model(x, state)
        state = h.detach(), c.detach()
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        value, grads = gradkit.value_and_grads(loss, model)
        grads, _ = gradkit.tree.clip_by_global_norm(grads, MAX_NORM)
        gradkit.step_(optimizer, model, grads)
        losses.append(value.item())
    return losses


def load(device: torch.device, steps: int, time: int = 32, batch: int = 32) -> tuple[
    list[Window], int
]:  # fmt: skip
    """Return the windows of a few modules' sources, and how many characters there are."""
    text = "".join(inspect.getsource(module) for module in (argparse, inspect, textwrap))
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    stream = torch.tensor([index[character] for character in text], device=device)
    # Each column continues in the next window.
    columns = stream[: len(stream) // batch * batch].view(batch, -1).t()
    starts = range(0, len(columns) - time - 1, time)
    windows = [(columns[i : i + time], columns[i + 1 : i + time + 1]) for i in starts]
    return [windows[i % len(windows)] for i in range(steps)], len(index)


def train(
    loop: Loop, windows: Sequence[Window], characters: int, device: torch.device
) -> tuple[nn.Module, list[float]]:
    """Return a model trained by this loop, and its losses."""
    torch.manual_seed(0)  # both loops start from the same weights
    model = LanguageModel(characters, width=96).to(device)
    return model, loop(model, windows)


def main(argv: list[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if all weights are equal."""
    options = parse(__doc__, argv)
    windows, characters = load(options.device, steps=20 if options.smoke else 400)
    with reproducible():
        theirs, _ = train(legacy, windows, characters, options.device)
        ours, losses = train(functional, windows, characters, options.device)
    first, last = (value / math.log(2) for value in (losses[0], sum(losses[-10:]) / 10))
    return verdict(theirs, ours, f"language model: from {first:.2f} to {last:.2f} bits a character")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
