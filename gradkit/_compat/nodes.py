"""What a node of the autograd graph shows of the operation that made it."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import torch
from torch.autograd.graph import Node

Shape: TypeAlias = tuple[int, ...]


def output_shape(node: Node, number: int) -> Shape:
    """Return the shape of an output of a node's operation. Run on torch 2.13."""
    return tuple(cast("Any", node)._input_metadata[number].shape)


def output_dtype(node: Node, number: int) -> torch.dtype:
    """Return the dtype of an output of a node's operation. Run on torch 2.13."""
    return cast("torch.dtype", cast("Any", node)._input_metadata[number].dtype)


def saved(node: Node, name: str) -> Any:
    """Return what a node has saved: a tensor, or an option of its operation."""
    # Raises RuntimeError if it was freed, or changed in place since, or if this version of torch
    # saves none. Run on torch 2.13.
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError as error:
        raise RuntimeError(f"{node.name()} saves no {name}") from error


def saved_ints(node: Node, name: str) -> list[int]:
    """Return the integer, or integers, that a node has saved. Run on torch 2.13."""
    value = saved(node, name)
    numbers = [value] if isinstance(value, int) else list(value or ())
    return [n - (1 << 64) if n >= 1 << 63 else n for n in numbers]  # torch shows them unsigned
