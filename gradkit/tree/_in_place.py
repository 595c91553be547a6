"""Sums and averages of trees in the memory of the first: no second set of gradients."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from gradkit._core.call import is_number, number_for_torch
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, describe, message
from gradkit.tree._in_place_leaves import InPlaceOperation, run_in_place


def add_(tree: PyTree, other: PyTree, *, alpha: float = 1) -> PyTree:
    """Add `alpha` times another tree to a tree, in its own memory, and return that tree.

    Example:
        >>> import torch, gradkit
        >>> total = {"w": torch.ones(2), "b": None}
        >>> gradkit.tree.add_(total, {"w": torch.ones(2), "b": torch.ones(1)}, alpha=0.5)
        {'w': tensor([1.5000, 1.5000]), 'b': tensor([0.5000])}

    Args:
        tree: A tree of tensors or None; its tensors are changed. Where it has None and `other` has
            a tensor, the entry of its list or dict is set to a new tensor.
        other: A tree of the same structure, of the same dtypes or of ones with less precision.
        alpha: The factor of `other`, a number.

    Returns:
        `tree` itself.

    Raises:
        LeafTypeError: A leaf is no floating-point or complex tensor.
        OptionError: `alpha` is no number.
        StructureError: The trees do not match; leaves of `tree` share memory with each other, or
            with other leaves of `other`; a None stands where nothing can be set, as in a tuple; or
            torch has no such operation for the dtype or layout of a leaf, as for float8.
        UnsupportedGraphError: A leaf requires grad, outside of `torch.no_grad()`; or the call is
            inside a transform of torch.func.

    Source:
        `torch.Tensor.add_`
    """
    by = _number("alpha", alpha)

    def add(xs: list[Tensor], ys: list[Tensor]) -> None:
        if {(y.dtype, y.layout) for y in ys} == {(xs[0].dtype, torch.strided)}:
            torch._foreach_add_(xs, ys, alpha=by)
        else:
            for x, y in zip(xs, ys, strict=True):
                x.add_(y, alpha=by)

    operation = InPlaceOperation(add, lambda x: x, lambda y: y * by, by, may_be_sparse=True)
    run_in_place(operation, tree, other, "other")
    return tree


def lerp_(tree: PyTree, end: PyTree, weight: float) -> PyTree:
    """Move a tree towards another one, in its own memory, and return it: an average over steps.

    Example:
        >>> import torch, gradkit
        >>> average = {"w": torch.zeros(2)}
        >>> gradkit.tree.lerp_(average, {"w": torch.ones(2)}, 0.25)
        {'w': tensor([0.2500, 0.2500])}

    Args:
        tree: As in `add_`, but no leaf is sparse. A module stands for its parameters.
        end: As `other` in `add_`.
        weight: A number: 0 leaves `tree` as it is, 1 makes it `end`. An exponential moving average
            with the decay d has the weight 1 - d.

    Returns:
        `tree` itself, of the values `tree + weight * (end - tree)`.

    Raises:
        OptionError: `weight` is no number.
        GradkitError: As in `add_`.

    Source:
        `torch.lerp`; `torch.optim.swa_utils.get_ema_multi_avg_fn`
    """
    by = _number("weight", weight)

    def lerp(xs: list[Tensor], ys: list[Tensor]) -> None:
        torch._foreach_lerp_(xs, [y.to_dense().to(xs[0].dtype) for y in ys], by)

    operation = InPlaceOperation(
        lerp, lambda x: x.mul_(1 - by), lambda y: y * by, by, may_be_sparse=False
    )
    run_in_place(operation, tree, end, "end")
    return tree


def _number(name: str, value: object) -> float:
    """Return a number for torch; raise if this is none."""
    if not is_number(value):
        fix = f"{name}=0.5; or {name}=float({name}), of a tensor"
        raise OptionError(message(name, "a real number", describe(value), fix))
    return cast("float", number_for_torch(value))
