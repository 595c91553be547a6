"""Mixed precision: autocast to float16, and a GradScaler that skips the steps that overflow.

    python examples/migrate/amp.py [--smoke] [--device cuda]

`legacy` and `functional` are the same loop, line by line. The scale begins too high and grows on
the way, so that some steps overflow; both loops must skip the same ones. The weights must be equal
bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from side_by_side import parse, reproducible, verdict
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import gradkit

Batch: TypeAlias = tuple[Tensor, Tensor]  # images [B, 1, 8, 8], digits [B]
Loop: TypeAlias = Callable[[nn.Module, GradScaler, Sequence[Batch]], list[float]]


def legacy(model: nn.Module, scaler: GradScaler, batches: Sequence[Batch]) -> list[float]:
    """Train through `.grad`, and return the scale after each step."""
    optimizer = AdamW(model.parameters(), lr=2e-3)
    scales = []
    for images, digits in batches:
        optimizer.zero_grad()
        with autocast(images.device.type, dtype=torch.float16):
            loss = cross_entropy(model(images), digits)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def functional(model: nn.Module, scaler: GradScaler, batches: Sequence[Batch]) -> list[float]:
    """Train with gradients as values, and return the scale after each step."""
    optimizer = AdamW(model.parameters(), lr=2e-3)
    scales = []
    for images, digits in batches:
        with autocast(images.device.type, dtype=torch.float16):
            loss = cross_entropy(model(images), digits)
        _, grads = gradkit.value_and_grads(scaler.scale(loss), model)
        gradkit.step_(optimizer, model, grads, scaler=scaler)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def load(device: torch.device, epochs: int, size: int = 64) -> tuple[list[Batch], Batch]:
    """Return the batches of all epochs of 1280 images, and the other 517 to test on."""
    pixels, digits = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(digits, device=device)
    random = torch.Generator().manual_seed(0)
    order = torch.randperm(len(y), generator=random)
    train, test = order[:1280], order[1280:].to(device)
    orders = [train[torch.randperm(1280, generator=random)] for _ in range(epochs)]
    rows = [part.to(device) for order in orders for part in torch.split(order, size)]
    return [(x[part], y[part]) for part in rows], (x[test], y[test])


def train(
    loop: Loop, batches: Sequence[Batch], device: torch.device
) -> tuple[nn.Module, list[float]]:
    """Return a model trained by this loop, and the scale at the start and after each step."""
    torch.manual_seed(0)  # both loops start from the same weights
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    # torch's defaults are 2**16 and 2000 steps; here some steps must overflow within seconds.
    scaler = GradScaler(device.type, init_scale=2.0**24, growth_interval=15)
    return model, [scaler.get_scale(), *loop(model, scaler, batches)]


def main(argv: list[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if all weights are equal."""
    options = parse(__doc__, argv)
    batches, (images, digits) = load(options.device, epochs=1 if options.smoke else 8)
    with reproducible():
        theirs, their_scales = train(legacy, batches, options.device)
        ours, scales = train(functional, batches, options.device)
    skipped = sum(new < old for old, new in pairwise(scales))
    if scales != their_scales or not 0 < skipped < len(batches):
        print(f"FAILED: skipped {skipped} of {len(batches)} steps; scales {scales}, "
              f"legacy {their_scales}", file=sys.stderr)  # fmt: skip
        return 1
    with torch.no_grad():
        accuracy = (ours(images).argmax(1) == digits).float().mean().item()
    result = f"{skipped} of {len(batches)} steps skipped by both, test accuracy {accuracy:.1%}"
    return verdict(theirs, ours, f"amp: {result}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
