"""Leaf tensors and the gradients that are to be theirs, matched and checked."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._checks.sharding import refuse_gathered
from gradkit._core import pytree
from gradkit._core.inputs import (
    Params,
    read_params,
)
from gradkit._core.leaf import is_dtensor
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.pytree import PyTree
from gradkit.errors import (
    LeafTypeError,
    StructureError,
    describe,
    message,
)

# Of each leaf tensor, once, what is to become of its `.grad`.
Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]


def match(params: PyTree, grads: PyTree) -> Pairs:
    """Return each leaf tensor once with its gradient, all of them checked.

    Args:
        params: The caller's tree.
        grads: The caller's tree.

    Returns:
        Pairs of a leaf tensor and its gradient, or None.
    """
    wanted = read_leaves(params)
    given = pytree.flatten_up_to(wanted.spec, "params", grads, "grads")
    if _plainly_match(wanted, given):
        return list(zip(wanted.variables, given, strict=True))
    pairs: dict[int, tuple[Tensor, Tensor | None]] = {}
    for index, (leaf, grad) in enumerate(zip(wanted.leaves, given, strict=True)):
        wrong = _mismatch(leaf, grad)
        if wrong is None and leaf is not None and id(leaf) in pairs:
            wrong = _tie_mismatch(pairs[id(leaf)][1], grad)
        if wrong is not None:
            where = pytree.path(wanted.spec, index, "grads")
            error = LeafTypeError if not isinstance(grad, Tensor | None) else StructureError
            raise error(message(where, *wrong, "pass the gradients of these very params"))
        if leaf is not None:
            pairs.setdefault(id(leaf), (leaf, grad))
    return list(pairs.values())


def _plainly_match(wanted: Params, given: list[Any]) -> bool:
    """Return whether every leaf is a plain variable of its own, and has a gradient that fits."""
    leaves = wanted.variables
    return (
        len(leaves) == len(given)
        and wanted.ordinary
        and set(map(type, given)) <= PLAIN_TYPES
        and list(map(_shape, leaves)) == list(map(_shape, given))
        and list(map(_grad_dtype, leaves)) == list(map(_dtype, given))
        and list(map(_device, leaves)) == list(map(_device, given))
        and set(map(_layout, given)) == {torch.strided}
    )


_shape, _dtype, _device, _layout, _grad_dtype = map(
    attrgetter, ("shape", "dtype", "device", "layout", "grad_dtype")
)


def _mismatch(leaf: Tensor | None, grad: object) -> tuple[str, str] | None:
    """Return what was expected and what came, if they do not go together."""
    if grad is None:
        return None
    if not isinstance(grad, Tensor):
        return "a tensor or None", describe(grad)
    if leaf is None or not leaf.requires_grad:
        why = "None" if leaf is None else "frozen; requires_grad_() would train it"
        return f"None, as the param is {why}", describe(grad)
    dtype = leaf.grad_dtype
    alike = (
        grad.shape == leaf.shape
        and grad.device == leaf.device
        and (dtype is None or grad.dtype == dtype)
        and is_dtensor(grad) == is_dtensor(leaf)
    )
    if not alike:
        return f"the gradient of {describe(leaf)}" + _in_dtype(leaf), describe(grad)
    if grad.layout not in (leaf.layout, torch.strided, torch.sparse_coo):
        return f"a gradient of layout {leaf.layout}, strided or sparse_coo", f"{grad.layout}"
    return None


def _in_dtype(leaf: Tensor) -> str:
    return "" if leaf.grad_dtype in (None, leaf.dtype) else f", in {leaf.grad_dtype}"


def _tie_mismatch(first: Tensor | None, second: Tensor | None) -> tuple[str, str] | None:
    if first is second or (
        first is not None
        and second is not None
        and first.layout == second.layout
        and torch.equal(first.to_dense(), second.to_dense())
    ):
        return None
    return "the gradient that the same tensor has in another place", "a different one"


def read_leaves(params: PyTree) -> Params:
    """Open up a tree of params that have a `.grad`.

    Args:
        params: The caller's tree.

    Returns:
        Its leaves, each a leaf tensor or None.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
    """
    wanted = read_params(params, wrapped=True)
    for index, leaf in enumerate(wanted.leaves):
        if leaf is not None and not leaf.is_leaf:
            raise LeafTypeError(
                message(
                    pytree.path(wanted.spec, index, "params"),
                    "a leaf tensor, which has a .grad",
                    f"{describe(leaf)} with a history",
                    "use value_and_grads or safe_retain for the gradients of intermediate values",
                )
            )
    refuse_gathered(wanted)
    return wanted


def unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors that are there, each once."""
    return list({id(t): t for t in tensors if t is not None}.values())
