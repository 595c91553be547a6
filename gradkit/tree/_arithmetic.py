"""Sums and products of trees of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core.leaf import common_dtype, inner, plus
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, describe, message
from gradkit.tree._columns import call_on_row, columns, columns_of
from gradkit.tree._numbers import check_number


def map(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply `fn` to the leaves of one or several trees.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.map(torch.sign, {"w": torch.tensor([-2.0, 3.0]), "b": None})
        {'w': tensor([-1.,  1.]), 'b': None}

    Args:
        fn: Takes one leaf of each tree.
        tree: A tree of tensors or None. Here, as in every function of `gradkit.tree`, a module
            stands for `dict(module.named_parameters())`, an iterator for the tuple of its items,
            an optimizer for the tuple of its parameters.
        rest: Trees of the same structure.

    Returns:
        A tree like the first. Where every tree has None, the result is None and `fn` is not called;
        where only some have None, `fn` gets zeros for them.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        OptionError: `fn` is not callable.
        StructureError: The trees do not match.
    """
    function: object = fn
    if not callable(function):
        advice = "gradkit.tree.map(fn, tree, ...), the function first"
        raise OptionError(message("fn", "a function of leaves", describe(function), advice))
    names = ["tree", *(f"rest[{index}]" for index in range(len(rest)))]
    leaves, unflatten = columns_of([tree, *rest], names)
    return unflatten([call_on_row(fn, row) for row in zip(*leaves, strict=True)])


def add(a: PyTree, b: PyTree) -> PyTree:
    """Return a + b.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.add({"w": torch.ones(2), "b": None}, {"w": torch.ones(2), "b": None})
        {'w': tensor([2., 2.]), 'b': None}

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A tree like `a`, None where both are. Two sparse leaves give a sparse one.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: The trees do not match.
    """
    (left, right), unflatten = columns(a=a, b=b)
    return unflatten([plus(x, y) for x, y in zip(left, right, strict=True)])


def sub(a: PyTree, b: PyTree) -> PyTree:
    """Return a - b.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.sub([torch.ones(2)], [torch.ones(2)])
        [tensor([0., 0.])]

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A tree like `a`, None where both are.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: The trees do not match.
    """
    (left, right), unflatten = columns(a=a, b=b)
    negative = [None if y is None else -y for y in right]
    return unflatten([plus(x, y) for x, y in zip(left, negative, strict=True)])


def scale(tree: PyTree, factor: float | Tensor) -> PyTree:
    """Return every leaf times a factor, in the leaf's dtype.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.scale({"w": torch.ones(2), "b": None}, 0.5)
        {'w': tensor([0.5000, 0.5000]), 'b': None}

    Args:
        tree: A tree of tensors or None.
        factor: A real number, or a real tensor of one element.

    Returns:
        A tree like `tree`.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        OptionError: `factor` is not one real number.
    """
    advice = "pass one factor; for one per leaf, gradkit.tree.map(torch.mul, tree, factors)"
    check_number("factor", factor, advice)
    (leaves,), unflatten = columns(tree=tree)
    present = [leaf for leaf in leaves if leaf is not None]
    scaled = iter(_times(present, factor))
    return unflatten([None if leaf is None else next(scaled) for leaf in leaves])


def _times(leaves: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiply one device and dtype after the other, as `clip_grads_with_norm_` does."""
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, leaf.dtype, leaf.layout, type(leaf)), []).append(index)
    scaled = list(leaves)
    for (device, dtype, layout, _), indices in groups.items():
        by = factor.reshape(()).to(device) if isinstance(factor, Tensor) else factor
        group = [leaves[index] for index in indices]
        # foreach has no rule for vmap, and fails at the gradient with respect to a tensor factor.
        learned = isinstance(by, Tensor) and by.requires_grad
        together = layout == torch.strided and not transforms() and not learned
        products = torch._foreach_mul(group, by) if together else [leaf * by for leaf in group]
        for index, product in zip(indices, products, strict=True):
            scaled[index] = product.to(dtype)
    return scaled


def dot(a: PyTree, b: PyTree) -> Tensor:
    """Return the inner product of two trees; of complex leaves, its real part.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.dot({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
        tensor(11.)

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A 0-dim tensor in the leaves' common dtype, float32 at least.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: The trees do not match.
    """
    (left, right), _ = columns(a=a, b=b)
    products = [inner(x, y) for x, y in zip(left, right, strict=True)]
    parts = [product for product in products if product is not None]
    if not parts:
        return torch.zeros(())
    dtype = common_dtype(parts)
    return torch.stack([part.to(parts[0].device, dtype) for part in parts]).sum()
