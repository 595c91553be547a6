"""Backward passes inside another computation: of an inner step, or of a recomputed one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inner_grads(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor | None]:
    """Return the gradients of outputs with respect to inputs; outputs without a graph add none."""
    seeds = [None] * len(outputs) if cotangents is None else cotangents
    pairs = [
        (output, seed)
        for output, seed in zip(outputs, seeds, strict=True)
        if output.requires_grad and (cotangents is None or seed is not None)
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    roots, seeds = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(roots, inputs, seeds, retain_graph, create_graph, allow_unused=True)
    )


def inner_grads_or_zeros(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None] | None = None,
    **options: bool,
) -> list[Tensor]:
    """Return what `inner_grads` does, with zeros where an input is not reached."""
    pairs = zip(inputs, inner_grads(outputs, inputs, cotangents, **options), strict=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in pairs]
