"""What the scripts share: options, images of digits, the comparison and the last line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options: `smoke`."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny run, for tests")
    return parser.parse_args(argv)


def digits(count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return images, [N, 64] from 0 to 1, and their digits, [N]; all, or so many."""
    from sklearn.datasets import load_digits  # which the script with a language model does without

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:count], dtype=torch.float32) / 16, torch.tensor(labels[:count])


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """Return how far apart two weights of the same name are at most; NaN if one is NaN."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    gaps = [(p.detach().cpu() - q.detach().cpu()).abs().max() for p, q in pairs]
    return torch.stack(gaps).max().item()


def verdict(usual: nn.Module, ours: nn.Module, result: str, atol: float = 0.0) -> int:
    """Print the result if all weights are equal up to `atol`, and return the exit status."""
    gap = largest_difference(usual, ours)
    if not gap <= atol:
        print(f"FAILED: two weights are {gap:.3g} apart, more than {atol:.3g}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") != "0":  # torchrun's; the first process prints
        return 0
    equal = "equal" if gap == 0 else f"equal up to {gap:.1g}"
    print(f"{result}; {sum(p.numel() for p in ours.parameters()):,} weights {equal}")
    return 0
