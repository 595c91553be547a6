"""Sums, products, norms and stacks of trees of gradients."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.leaf import inner, is_dtensor, largest, plus, stored, whole
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message


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
        A tree like the first. Where every tree has None it is None, and `fn` is not called; where
        only some have, `fn` gets zeros for them.

    Raises:
        StructureError: The trees do not match.
    """
    columns, unflatten = _columns(tree, *rest)
    return unflatten([_call(fn, leaves) for leaves in zip(*columns, strict=True)])


def _call(fn: Callable[..., Any], leaves: Sequence[Tensor | None]) -> Any:
    like = next((leaf for leaf in leaves if leaf is not None), None)
    if like is None:
        return None
    return fn(*(torch.zeros_like(like) if leaf is None else leaf for leaf in leaves))


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
        StructureError: The trees do not match.
    """
    (left, right), unflatten = _columns(a, b)
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
        StructureError: The trees do not match.
    """
    (left, right), unflatten = _columns(a, b)
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
        LeafTypeError: A leaf is no tensor.
        StructureError: `factor` is not one real number.
    """
    (leaves,), unflatten = _columns(tree)
    if not _is_real_number(factor):
        do = "one factor; for one a leaf, gradkit.tree.map(torch.mul, tree, factors)"
        raise StructureError(message("factor", "one real number", describe(factor), do))
    present = [leaf for leaf in leaves if leaf is not None]
    scaled = iter(_times(present, factor))
    return unflatten([None if leaf is None else next(scaled) for leaf in leaves])


def _is_real_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _times(leaves: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiply device by device and dtype by dtype, as `clip_grads_with_norm_` does."""
    kinds: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        kinds.setdefault((leaf.device, leaf.dtype, leaf.layout, type(leaf)), []).append(index)
    scaled = list(leaves)
    for (device, dtype, layout, _), places in kinds.items():
        by = factor.reshape(()).to(device) if isinstance(factor, Tensor) else factor
        group = [leaves[index] for index in places]
        # foreach has no rule for vmap, and fails at the gradient by a tensor that multiplies.
        learned = isinstance(by, Tensor) and by.requires_grad
        many = layout == torch.strided and not transforms() and not learned
        products = torch._foreach_mul(group, by) if many else [leaf * by for leaf in group]
        for index, product in zip(places, products, strict=True):
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
        StructureError: The trees do not match.
    """
    (left, right), _ = _columns(a, b)
    parts = [inner(x, y) for x, y in zip(left, right, strict=True)]
    present = [part for part in parts if part is not None]
    if not present:
        return torch.zeros(())
    return torch.stack([part.to(present[0].device, _widest(present)) for part in present]).sum()


def _widest(parts: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(p.dtype == torch.float64 for p in parts) else parts[0].dtype


def global_norm(tree: PyTree) -> Tensor:
    """Return the Euclidean norm of all leaves taken as one vector.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.global_norm({"w": torch.tensor([3.0, 4.0]), "b": None})
        tensor(5.)

    Args:
        tree: A tree of tensors or None.

    Returns:
        A 0-dim tensor; zero if every leaf is None.

    Source:
        `torch.nn.utils.get_total_norm`, the norm that `clip_grad_norm_` computes.
    """
    (leaves,), _ = _columns(tree)
    dense = [stored(leaf) for leaf in leaves if leaf is not None]
    if not dense:
        return torch.zeros(())
    # get_total_norm runs under no_grad: its result would be silently constant. And it takes either
    # DTensors or others.
    alike = len(set(builtins.map(is_dtensor, dense))) == 1
    if alike and not transforms() and not any(g.requires_grad for g in dense):
        return whole(torch.nn.utils.get_total_norm(dense))
    norms = torch.stack([whole(torch.linalg.vector_norm(g)).to(dense[0].device) for g in dense])
    return cast("Tensor", torch.linalg.vector_norm(norms))


def clip_by_global_norm(tree: PyTree, max_norm: float) -> PyTree:
    """Return the tree scaled down, where needed, to a global norm of at most `max_norm`.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
        {'w': tensor([0.6000, 0.8000])}

    Args:
        tree: A tree of tensors or None.
        max_norm: The largest norm, in the units of `global_norm`.

    Returns:
        A tree like `tree`, bit for bit what `clip_grad_norm_` leaves in `.grad`.

    Source:
        `torch.nn.utils.clip_grad_norm_`; Pascanu et al. 2013, "On the difficulty of training
        recurrent neural networks", algorithm 1, https://arxiv.org/abs/1211.5063
    """
    factor = max_norm / (global_norm(tree) + 1e-6)
    return scale(tree, factor.clamp(max=1.0))


def cosine(a: PyTree, b: PyTree) -> Tensor:
    """Return the cosine of the angle between two trees, each taken as one vector.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.cosine({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([-2.0, 0.0])})
        tensor(-1.)

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A 0-dim tensor between -1 and 1; zero if one of the trees is zero.

    Raises:
        StructureError: The trees do not match.
    """
    # Scaled by the largest entry, since squares of gradients leave the range of float32.
    left, right = (largest(pytree.flatten(x)[0]) for x in (a, b))
    is_zero = (left == 0) | (right == 0)
    a, b = (scale(x, 1 / torch.where(is_zero, 1.0, top)) for x, top in ((a, left), (b, right)))
    product = dot(a, b)
    # The root of zero has no derivative: it is kept out of the graph, not only of the result.
    one = torch.ones_like(product)  # a number would make the tangents of jvp float64
    squares = [torch.where(is_zero, one, dot(x, x)) for x in (a, b)]
    cosine = (product / squares[0].sqrt() / squares[1].sqrt()).clamp(-1, 1)
    return torch.where(is_zero & ~product.isnan(), torch.zeros_like(cosine), cosine)


def stack(trees: Sequence[PyTree]) -> PyTree:
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
        StructureError: There are no trees, or they do not match.
    """
    if not trees:
        raise StructureError(message("trees", "at least one tree", "none", "pass trees to stack"))
    columns, unflatten = _columns(*trees)
    dense = [[None if x is None else x.to_dense() for x in column] for column in columns]
    return unflatten([
        _call(lambda *rows: torch.stack(rows), rows) for rows in zip(*dense, strict=True)
    ])


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
        StructureError: The leaves are not of one length K, or all are None.
    """
    (leaves,), unflatten = _columns(tree)
    lengths = {len(leaf) if leaf.dim() else None for leaf in leaves if leaf is not None}
    if len(lengths) != 1 or None in lengths:
        got = f"lengths {list(lengths)}" if lengths else "none that is not None"
        raise StructureError(message("tree", "leaves of one length K", got, "pass a stacked tree"))
    count = next(iter(lengths)) or 0
    rows = [
        [None] * count if leaf is None else [row.clone() for row in leaf.unbind()]
        for leaf in leaves
    ]
    return [unflatten(row) for row in zip(*rows, strict=True)]


def allclose(
    a: PyTree, b: PyTree, *, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether two trees are equal up to rounding; None is close to zeros.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.allclose({"w": torch.zeros(2)}, {"w": None})
        True

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.
        rtol: The relative tolerance, of `b`.
        atol: The absolute tolerance.
        equal_nan: Whether NaN equals NaN.

    Returns:
        True if every leaf is.

    Raises:
        StructureError: The trees do not match.

    Source:
        `torch.allclose`.
    """

    def close(x: Tensor, y: Tensor) -> bool:
        x, y = whole(x).to_dense(), whole(y).to_dense()
        return torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)

    leaves, _ = pytree.flatten(map(close, a, b))
    return all(leaf is not False for leaf in leaves)


def _columns(
    first: PyTree, *rest: PyTree
) -> tuple[list[list[Tensor | None]], Callable[[Sequence[Any]], PyTree]]:
    """Return the leaves of each tree, matched to those of the first, and how to put them back."""
    leaves, spec = pytree.flatten(first)
    columns = [
        leaves,
        *(pytree.flatten_up_to(spec, "the first tree", tree, "the other tree") for tree in rest),
    ]
    for index, row in enumerate(zip(*columns, strict=True)):
        for leaf in row:
            if leaf is not None and not isinstance(leaf, Tensor):
                where = pytree.path(spec, index, "tree")
                do = "pass a tree of gradients, as gradkit's calls return it"
                raise LeafTypeError(message(where, "a tensor or None", describe(leaf), do))
        shapes = {tuple(x.shape) for x in row if x is not None}
        if len(shapes) > 1:
            raise StructureError(
                message(
                    pytree.path(spec, index, "tree"),
                    "one shape in all trees",
                    " and ".join(builtins.map(str, sorted(shapes))),
                    "pass gradients of the same parameters",
                )
            )
    return columns, spec.unflatten
