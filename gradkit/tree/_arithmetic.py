"""Sums, products and stacks of trees of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core.leaf_arithmetic import inner, plus, promoted
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, StructureError, describe, message
from gradkit.tree._columns import call_on_row, columns


def map(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Apply `fn` to the leaves of one or several trees.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.map(torch.sign, {"w": torch.tensor([-2.0, 3.0]), "b": None})
        {'w': tensor([-1.,  1.]), 'b': None}

    Args:
        fn: Takes one leaf of each tree.
        tree: A tree of tensors or None.
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
        fix = "gradkit.tree.map(fn, tree, ...), the function first"
        raise OptionError(message("fn", "a function of leaves", describe(function), fix))
    others = {f"rest[{index}]": other for index, other in enumerate(rest)}
    leaves, unflatten = columns({"tree": tree, **others})
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
    leaves, unflatten = columns({"a": a, "b": b})
    return unflatten([plus(x, y) for x, y in zip(*leaves, strict=True)])


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
    leaves, unflatten = columns({"a": a, "b": b})
    pairs = zip(*leaves, strict=True)
    return unflatten([plus(x, None if y is None else -y) for x, y in pairs])


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
    fix = "pass one factor; for one per leaf, gradkit.tree.map(torch.mul, tree, factors)"
    check_number("factor", factor, fix)
    (leaves,), unflatten = columns({"tree": tree})
    # One device and dtype after the other, as `clip_grads_with_norm_` does.
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf is not None:
            kind = (leaf.device, leaf.dtype, leaf.layout, type(leaf))
            groups.setdefault(kind, []).append(index)
    scaled = list(leaves)
    for (device, dtype, layout, _), indices in groups.items():
        by = factor.reshape(()).to(device) if isinstance(factor, Tensor) else factor
        group = cast("list[Tensor]", [leaves[index] for index in indices])
        # foreach has no rule for vmap, and fails at the gradient with respect to a tensor factor.
        learned = isinstance(by, Tensor) and by.requires_grad
        together = layout == torch.strided and not transforms() and not learned
        products = torch._foreach_mul(group, by) if together else [leaf * by for leaf in group]
        for index, product in zip(indices, products, strict=True):
            scaled[index] = product.to(dtype)
    return unflatten(scaled)


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
    leaves, _ = columns({"a": a, "b": b})
    products = [inner(x, y) for x, y in zip(*leaves, strict=True)]
    parts = [product for product in products if product is not None]
    return torch.stack(promoted(parts)).sum() if parts else torch.zeros(())


def stack(trees: Iterable[PyTree]) -> PyTree:
    """Return one tree whose leaves are those of K trees stacked.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.stack([{"w": torch.ones(2)}, {"w": None}])
        {'w': tensor([[1., 1.],
                [0., 0.]])}

    Args:
        trees: K trees of one structure.

    Returns:
        A tree like the first, its leaves of shape `[K, *leaf.shape]` and dense; None where every
        tree has None.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: There are no trees, or they do not match.
    """
    fix = "gradkit.tree.stack([first, second])"
    if isinstance(trees, Mapping | Tensor) or not isinstance(trees, Iterable):
        raise StructureError(message("trees", "a list of trees", describe(trees), fix))
    named = {f"trees[{index}]": tree for index, tree in enumerate(trees)}
    if not named:
        raise StructureError(message("trees", "at least one tree", "none", fix))
    leaves, unflatten = columns(named)
    dense = [[None if x is None else x.to_dense() for x in column] for column in leaves]
    rows = zip(*dense, strict=True)
    return unflatten([call_on_row(lambda *row: torch.stack(row), row) for row in rows])


def unstack(tree: PyTree) -> list[PyTree]:
    """Return the K trees of which this is the `stack`.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.unstack({"w": torch.tensor([[1.0], [2.0]]), "b": None})
        [{'w': tensor([1.]), 'b': None}, {'w': tensor([2.]), 'b': None}]

    Args:
        tree: Leaves of shape `[K, ...]`, or None.

    Returns:
        K trees like it, None where it has None.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        StructureError: The leaves are not of one length K, or all are None.
    """
    (leaves,), unflatten = columns({"tree": tree})
    shapes = {tuple(leaf.shape) for leaf in leaves if leaf is not None}
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        expected = "leaves of one length K in their first dimension"
        shown = " and ".join(str(shape) for shape in sorted(shapes))
        got = f"shapes {shown}" if shapes else "None everywhere"
        raise StructureError(message("tree", expected, got, "pass what tree.stack returned"))
    ((count,),) = lengths
    rows = [
        [None] * count if leaf is None else [row.clone() for row in leaf.unbind()]
        for leaf in leaves
    ]
    return [unflatten(row) for row in zip(*rows, strict=True)]


def is_real_number(value: object) -> bool:
    """Return whether this is a real number, or a real tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def check_number(name: str, value: Any, fix: str, *, nonnegative: bool = False) -> None:
    """Raise if this is no real number or real tensor of one element; the latter's sign is free."""
    if isinstance(value, bool) or not is_real_number(value):
        kind = "a real number, or a real tensor of one element"
        raise OptionError(message(name, kind, describe(value), fix))
    if nonnegative and not isinstance(value, Tensor) and not value >= 0:
        raise OptionError(message(name, "a number of at least 0", repr(value), fix))
