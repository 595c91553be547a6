"""A classifier of handwritten digits: micro-batches, clipping and a learning-rate schedule.

    python examples/migrate/classifier.py [--smoke] [--device cuda]

`legacy` and `functional` are the same loop, line by line. The weights must be equal bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from side_by_side import parse, verdict
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import gradkit

PARTS = 4  # micro-batches to a batch
MAX_NORM = 1.0
LEARNING_RATE = 5e-3

Batch: TypeAlias = tuple[Tensor, Tensor]  # images [B, 64], digits [B]
Loop: TypeAlias = Callable[[nn.Module, Sequence[Batch]], float]


def legacy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Train through `.grad`, and return the last loss."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = OneCycleLR(optimizer, LEARNING_RATE, total_steps=len(batches))
    for images, digits in batches:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(images.chunk(PARTS), digits.chunk(PARTS), strict=True):
            loss = cross_entropy(model(x), y, reduction="sum") / len(digits)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
    return total


def functional(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Train with gradients as values, and return the last loss."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    scheduler = OneCycleLR(optimizer, LEARNING_RATE, total_steps=len(batches))
    for images, digits in batches:
        grads = None
        total = 0.0
        for x, y in zip(images.chunk(PARTS), digits.chunk(PARTS), strict=True):
            loss = cross_entropy(model(x), y, reduction="sum") / len(digits)
            value, new = gradkit.value_and_grads(loss, model)
            grads = new if grads is None else gradkit.tree.add(grads, new)
            total += value.item()
        grads, _ = gradkit.tree.clip_by_global_norm(grads, MAX_NORM)
        gradkit.step_(optimizer, model, grads)
        scheduler.step()
    return total


def load(device: torch.device) -> tuple[Batch, Batch]:
    """Return 1280 images to train on, and the other 517 to test on."""
    pixels, digits = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
    y = torch.tensor(digits, device=device)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).to(device)
    return (x[order[:1280]], y[order[:1280]]), (x[order[1280:]], y[order[1280:]])


def shuffled(data: Batch, epochs: int, size: int = 64) -> list[Batch]:
    """Return the full batches of all epochs."""
    images, digits = data
    random = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(digits), generator=random) for _ in range(epochs)]
    rows = [part.to(images.device) for order in orders for part in torch.split(order, size)]
    return [(images[part], digits[part]) for part in rows]


def train(loop: Loop, batches: Sequence[Batch], device: torch.device) -> tuple[nn.Module, float]:
    """Return a model trained by this loop, and its last loss."""
    torch.manual_seed(0)  # both loops start from the same weights, and drop the same units
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    ).to(device)  # fmt: skip
    return model, loop(model, batches)


def main(argv: list[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if all weights are equal."""
    options = parse(__doc__, argv)
    data, (images, digits) = load(options.device)
    batches = shuffled(data, epochs=1 if options.smoke else 15)
    theirs, _ = train(legacy, batches, options.device)
    ours, loss = train(functional, batches, options.device)
    with torch.no_grad():
        accuracy = (ours.eval()(images).argmax(1) == digits).float().mean().item()
    return verdict(theirs, ours, f"classifier: loss {loss:.4f}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
