"""What a function returns beside its losses: any tree, whose tensors pass through a transform."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message

_CONSTANTS = (str, bytes, Number, Enum, torch.dtype, torch.device, torch.Size, torch.layout)


def is_constant(leaf: object) -> bool:
    """Return whether a leaf that is no tensor cannot be a container of some."""
    return leaf is None or isinstance(leaf, _CONSTANTS) or callable(leaf)


def split_aux(returned: object) -> tuple[Any, Any]:
    """Return the losses and aux that a function has returned."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise StructureError(
            message(
                "fn", "(losses, aux), with has_aux=True", describe(returned), "return losses, aux"
            )
        )
    return returned[0], returned[1]


def tensors_of(tree: PyTree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], PyTree]]:
    """Return the tensors of a tree, and a function that puts others in their places."""
    leaves, spec = pytree.flatten(tree)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) and not is_constant(leaf):
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "aux"),
                    "a tensor, or a constant: a number, text, a function, a module",
                    f"{describe(leaf)}, which is no tree that optree knows",
                    "return a dict; or register the class: optree.register_pytree_node",
                )
            )
    constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def put_back(tensors: Iterable[Tensor]) -> PyTree:
        rest = iter(tensors)
        return pytree.unflatten(spec, [next(rest) if c is None else c[0] for c in constants])

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], put_back
