"""What the six scripts share: options, the comparison, and the last line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options: `smoke` and `device`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny run, for tests")
    parser.add_argument("--device", type=torch.device, default="cpu", help="default: cpu")
    return parser.parse_args(argv)


@contextmanager
def reproducible() -> Iterator[None]:
    """Disable cuDNN, whose convolutions and LSTMs may sum in another order in each run."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


def as_bytes(weight: Tensor) -> Tensor:
    """Return the bytes. As floats, 0.0 equals -0.0, and NaN does not equal itself."""
    return weight.detach().contiguous().reshape(-1).view(torch.uint8)


def differing_weights(a: nn.Module, b: nn.Module) -> list[str]:
    """Return the names of the weights that differ between two models in at least one bit."""
    others = dict(b.named_parameters())
    return [
        name
        for name, weight in a.named_parameters()
        if not torch.equal(as_bytes(weight), as_bytes(others[name]))
    ]


def verdict(legacy: nn.Module, functional: nn.Module, result: str) -> int:
    """Print the result if all weights are equal, and return the exit status."""
    differing = differing_weights(legacy, functional)
    if differing:
        print(f"FAILED: the two runs differ in {', '.join(differing)}", file=sys.stderr)
        return 1
    count = sum(weight.numel() for weight in legacy.parameters())
    print(f"{result}; {count:,} weights equal bit for bit")
    return 0
