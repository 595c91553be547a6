"""Leaf tensors matched with their gradients, and checked."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._checks.sharding import refuse_gathered
from gradkit._compat.dtensor import is_dtensor
from gradkit._core import pytree
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit.dotgrad._mistakes import known_mistake, refuse_state_dict
from gradkit.errors import GradkitError, LeafTypeError, StructureError, describe, message

# Each leaf tensor once, with its gradient.
Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]


def match(params: PyTree, grads: PyTree) -> Pairs:
    """Return each leaf tensor once with its gradient, after all checks."""
    return match_leaves(read_leaves(params), grads)


def match_leaves(params: Params, grads: PyTree) -> Pairs:
    """Return each leaf tensor once with its gradient, after all checks."""
    refuse_state_dict(grads, "grads")
    try:
        return _matched(params, grads)
    except GradkitError as error:
        raise (known_mistake(params, grads) or error) from None


def _matched(params: Params, grads: PyTree) -> Pairs:
    by_leaf = pytree.flatten_up_to(params.spec, "params", grads, "grads")
    if _plainly_match(params, by_leaf):
        return list(zip(params.variables, by_leaf, strict=True))
    pairs: dict[int, tuple[Tensor, Tensor | None]] = {}
    for index, (leaf, grad) in enumerate(zip(params.leaves, by_leaf, strict=True)):
        mismatch = _mismatch(leaf, grad)
        if mismatch is None and leaf is not None and id(leaf) in pairs:
            mismatch = _tie_mismatch(pairs[id(leaf)][1], grad)
        if mismatch is not None:
            where = pytree.path(params.spec, index, "grads")
            error = StructureError if isinstance(grad, Tensor | None) else LeafTypeError
            raise error(message(where, *mismatch, "pass the gradients of these very params"))
        if leaf is not None:
            pairs.setdefault(id(leaf), (leaf, grad))
    return list(pairs.values())


def _plainly_match(params: Params, grads: list[Any]) -> bool:
    """Return whether every leaf is an ordinary variable, different from the others, and matches."""
    leaves = params.variables
    return (
        len(leaves) == len(grads)
        and params.plain_leaves
        and set(map(type, grads)) <= PLAIN_TYPES
        and list(map(_shape, leaves)) == list(map(_shape, grads))
        and list(map(_grad_dtype, leaves)) == list(map(_dtype, grads))
        and list(map(_device, leaves)) == list(map(_device, grads))
        and set(map(_layout, grads)) == {torch.strided}
    )


_shape, _dtype, _device, _layout, _grad_dtype = map(
    attrgetter, ("shape", "dtype", "device", "layout", "grad_dtype")
)


def _mismatch(leaf: Tensor | None, grad: object) -> tuple[str, str] | None:
    """Return what was expected and what came, if they do not match."""
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
    """Open and check a tree of params whose `.grad` is read or written."""
    refuse_state_dict(params, "params")
    opened = read_params(params, allow_distributed=True)
    for index, leaf in enumerate(opened.leaves):
        if leaf is not None and not leaf.is_leaf:
            where = pytree.path(opened.spec, index, "params")
            got = f"{describe(leaf)} that was computed from others"
            advice = "use value_and_grads or safe_retain for the gradients of intermediate values"
            raise LeafTypeError(message(where, "a leaf tensor, which has a .grad", got, advice))
    refuse_gathered(opened)
    return opened


def unique(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the tensors, each once, without None."""
    return list({id(t): t for t in tensors if t is not None}.values())
