"""Formulas of operations, to be differentiated in their place where torch's own rules are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[..., Any]


def weight_norm(_: Operation, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return a tensor with the norms `g`."""
    norm: Tensor = torch.norm_except_dim(v, 2, dim)
    return v * (g / norm)


def prelu(_: Operation, input: Tensor, weight: Tensor) -> Tensor:
    """Return what torch.prelu does."""
    if weight.numel() > 1 and input.dim() > 1:  # one for each channel
        weight = weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, weight * input)


def linear_cross_entropy(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Return what it does without chunks, which would be differentiated in the forward pass."""
    return operation(*args, **kwargs | {"options": None})


def of_symmetric(operation: Operation, a: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a function of a symmetric matrix, whose tangent is made symmetric, too.

    Its rules of reverse mode do that with the gradient; those of forward mode rely on it.
    """
    half = (a + a.mH) / 2
    return operation(a.detach() + (half - half.detach()), *args, **kwargs)


FORMULAS: dict[str, Callable[..., Any]] = {
    "weight_norm": weight_norm,
    "prelu": prelu,
    "linear_cross_entropy": linear_cross_entropy,
    **dict.fromkeys(("cholesky", "cholesky_ex", "eigh", "eigvalsh"), of_symmetric),
}
