"""Accumulation into `.grad` by the engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def accumulate_through_engine(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients to the `.grad` of leaf tensors in an engine pass, which calls their hooks."""
    present = [(leaf, grad.detach()) for leaf, grad in pairs if grad is not None]
    if present:
        leaves, grads = zip(*present, strict=True)
        torch.autograd.backward(leaves, grads)
