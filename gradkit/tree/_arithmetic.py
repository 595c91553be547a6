"""Sums, products and stacks of trees of gradients, whose leaves stand side by side."""

from __future__ import annotations

import builtins  # `map` is gradkit's in this module
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from gradkit._compat.distributed import has_rank, is_dtensor, sharded_like
from gradkit._compat.transforms import in_dual_level, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import check_number
from gradkit._core.leaf_arithmetic import (
    ARITHMETIC_DTYPES,
    add_leaves,
    dot_leaves,
    jagged_like,
    to_common_dtype,
    without_autocast,
)
from gradkit._core.ownership import PLAIN_TYPES, zeros_of
from gradkit._core.params import DIFFERENTIABLE, expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message

Leaf: TypeAlias = Tensor | None
_layout, _is_nested, _requires_grad, _dtype, _device, _shape = builtins.map(
    attrgetter, ("layout", "is_nested", "requires_grad", "dtype", "device", "shape")
)
_DENSE = {torch.strided}
_WIDE = (torch.float32, torch.float64)  # products are computed in these anyway
_FOREACH = ("cpu", "cuda")  # devices that have the `torch._foreach_*` kernels


class ClippedGrads(NamedTuple):
    """What clipping returns: a pair, which is no tree of gradients itself."""

    clipped: PyTree
    norm: Tensor


def are_dense(leaves: Collection[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether there are leaves, and all are plain dense tensors."""
    return (
        not torch.compiler.is_compiling()  # torch.compile takes no map over an attrgetter
        and PLAIN_TYPES.issuperset(builtins.map(type, leaves))
        and set(builtins.map(_layout, leaves)) == _DENSE
        and not any(builtins.map(_is_nested, leaves))
    )


def are_dense_constants(leaves: Collection[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether all are plain dense tensors without a graph, a tangent or a transform."""
    return (
        are_dense(leaves)
        and not any(builtins.map(_requires_grad, leaves))
        and not transforms()
        and not in_dual_level()
    )


def are_of_one_kind(
    leaves: Iterable[Tensor], dtypes: Collection[torch.dtype] = ARITHMETIC_DTYPES
) -> bool:
    """Return whether tensors are all of one of these dtypes, on one CPU or CUDA device."""
    own_dtypes, devices = set(builtins.map(_dtype, leaves)), set(builtins.map(_device, leaves))
    return (
        len(own_dtypes) == len(devices) == 1
        and own_dtypes.issubset(dtypes)
        and devices.pop().type in _FOREACH
    )


def foreach_takes(leaves: Sequence[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether one `torch._foreach_*` kernel takes all leaves: dense constants of a kind."""
    return are_dense_constants(leaves) and are_of_one_kind(leaves)


def zeros_like(tree: PyTree, *, dtype: torch.dtype | None = None) -> PyTree:
    """Return zeros of the shapes of a tree: somewhere to add to.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.zeros_like({"w": torch.ones(2), "b": None})
        {'w': tensor([0., 0.]), 'b': None}

    Args:
        tree: A tree of tensors or None.
        dtype: That of all leaves; None is that of each leaf of `tree`.

    Returns:
        A tree like `tree`, which requires no grad; None where it has None.
    """
    _check_type("dtype", dtype, torch.dtype, "dtype=torch.float32")
    return map(partial(zeros_of, dtype=dtype), tree)


def randn_like(tree: PyTree, *, generator: torch.Generator | None = None) -> PyTree:
    """Return random numbers of a standard normal distribution, of the shapes of a tree.

    A direction for `gradkit.func.hvp` and its kin, say, or a probe of a matrix.

    Example:
        >>> import torch, gradkit
        >>> direction = gradkit.tree.randn_like({"w": torch.ones(2), "b": None})
        >>> direction["w"].shape, direction["b"]
        (torch.Size([2]), None)

    Args:
        tree: A tree of floating-point or complex tensors or None.
        generator: Where the numbers come from; None is torch's default.

    Returns:
        A tree like `tree`, dense, which requires no grad; None where it has None. A tensor that
        stands in several places has the same numbers in all of them, as it is one variable.

    Raises:
        LeafTypeError: A leaf is no floating-point or complex tensor.
    """
    fix = "generator=torch.Generator().manual_seed(0)"
    _check_type("generator", generator, torch.Generator, fix)
    (leaves,), spec = aligned_leaves({"tree": tree})
    for index, leaf in enumerate(leaves):
        if leaf is not None and not leaf.is_floating_point() and not leaf.is_complex():
            where, fix = pytree.path(spec, index, "tree"), "put None in its place"
            raise LeafTypeError(message(where, DIFFERENTIABLE, describe(leaf), fix))
    drawn: dict[int, Tensor] = {}

    def draw(leaf: Tensor) -> Tensor:
        if id(leaf) in drawn:
            return drawn[id(leaf)].clone()
        return drawn.setdefault(id(leaf), _normal(leaf, generator))

    return _unflatten_rows(partial(apply_with_zeros, draw), [leaves], spec)


def _check_type(name: str, value: object, kind: type, fix: str) -> None:
    if value is not None and not isinstance(value, kind):
        expected = f"a torch.{kind.__name__} or None"
        raise OptionError(message(name, expected, describe(value), fix))


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    if is_dtensor(like) and generator is None:
        return torch.randn_like(like)  # whose shards differ
    if like.layout == torch.jagged:
        return jagged_like(_normal(like.values(), generator), like)
    if like.is_nested:
        return torch.nested.as_nested_tensor([_normal(row, generator) for row in like.unbind()])
    numbers = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return sharded_like(numbers, like) if is_dtensor(like) else numbers


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
        OptionError: `fn` is not callable.

    Source:
        `jax.tree.map`, which also takes None for the absence of a leaf.
    """
    function: object = fn
    if not callable(function):
        fix = "gradkit.tree.map(fn, tree, ...), the function first"
        raise OptionError(message("fn", "a function of leaves", describe(function), fix))
    trees = aligned_leaves({"tree": tree, **_named(rest)})
    return _unflatten_rows(partial(apply_with_zeros, fn), *trees)


def add(a: PyTree, b: PyTree, *rest: PyTree) -> PyTree:
    """Return the sum of two or more trees, added from the left: `torch.add`, leaf by leaf.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.add({"w": torch.ones(2), "b": None}, {"w": torch.ones(2), "b": None})
        {'w': tensor([2., 2.]), 'b': None}

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.
        rest: More of them.

    Returns:
        A tree like `a`, None where all are. Sparse leaves give a sparse one.
    """
    return _combined(torch._foreach_add, add_leaves, {"a": a, "b": b, **_named(rest)})


def _named(rest: Sequence[PyTree]) -> dict[str, PyTree]:
    return {f"rest[{index}]": tree for index, tree in enumerate(rest)}


def _combined(foreach: Any, by_leaf: Callable[..., Leaf], trees: Mapping[str, PyTree]) -> PyTree:
    """Return trees combined from the left, by a kernel for lists where it takes all leaves."""
    leaves, spec = aligned_leaves(trees)
    if foreach_takes([*chain.from_iterable(leaves)]):
        return pytree.unflatten(spec, reduce(foreach, leaves))
    return _unflatten_rows(by_leaf, leaves, spec)


def sub(a: PyTree, b: PyTree) -> PyTree:
    """Return a - b: `torch.sub`, leaf by leaf.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.sub([torch.ones(2)], [torch.ones(2)])
        [tensor([0., 0.])]

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.

    Returns:
        A tree like `a`, None where both are.
    """
    return _combined(
        torch._foreach_sub, lambda x, y: add_leaves(x, None if y is None else -y), {"a": a, "b": b}
    )


def scale(tree: PyTree, factor: float | Tensor) -> PyTree:
    """Return every leaf times a factor, in the leaf's dtype: `torch.mul`, leaf by leaf.

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
        OptionError: `factor` is not one real number.
    """
    fix = "pass one factor; for one per leaf, gradkit.tree.map(torch.mul, tree, factors)"
    factor = check_number("factor", factor, fix)
    (leaves,), spec = aligned_leaves({"tree": tree})
    return pytree.unflatten(spec, scale_leaves(leaves, factor))


def scale_leaves(leaves: Sequence[Leaf], factor: float | Tensor) -> list[Leaf]:
    """Return every leaf times a factor, in the leaf's dtype."""
    scaled = list(leaves)
    for (device, dtype, layout, _, mesh), indices in group_alike(leaves).items():
        by = factor.reshape(()).to(device) if isinstance(factor, Tensor) else factor
        group = cast("list[Tensor]", [leaves[index] for index in indices])
        # foreach has no rule for vmap, and fails at the gradient with respect to a tensor factor;
        # on a rank outside of the mesh, torch gives other placements.
        learned = isinstance(by, Tensor) and by.requires_grad
        together = layout == torch.strided and not transforms() and not learned and has_rank(mesh)
        products = torch._foreach_mul(group, by) if together else [leaf * by for leaf in group]
        for index, product in zip(indices, products, strict=True):
            scaled[index] = product if product.dtype == dtype else product.to(dtype)
    return scaled


def group_alike(leaves: Sequence[Leaf]) -> dict[Any, list[int]]:
    """Return the leaves of each device, dtype, layout, type and mesh, which one kernel takes."""
    groups: dict[Any, list[int]] = {}
    for index, x in enumerate(leaves):
        if x is not None:
            mesh = None if type(x) in PLAIN_TYPES else getattr(x, "device_mesh", None)
            layout = "nested" if x.is_nested else x.layout
            key = x.device, x.dtype, layout, type(x), mesh
            groups.setdefault(key, []).append(index)
    return groups


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

    Source:
        `torch.dot`, summed over the leaves; of complex leaves the real part of `torch.vdot`.
    """
    leaves, _ = aligned_leaves({"a": a, "b": b})
    both = [*leaves[0], *leaves[1]]
    if are_dense(both) and are_of_one_kind(both, _WIDE):  # in a third of the time
        vectors = [
            (x.reshape(-1), y.reshape(-1)) for x, y in zip(*cast("Any", leaves), strict=True)
        ]
        with without_autocast(both[0].device), INSIDE:
            return torch.stack(list(starmap(torch.dot, vectors))).sum()
    products = [dot_leaves(x, y) for x, y in zip(*leaves, strict=True)]
    parts = [product for product in products if product is not None]
    return torch.stack(to_common_dtype(parts)).sum() if parts else torch.zeros(())


def stack(trees: Iterable[PyTree]) -> PyTree:
    """Return one tree whose leaves are those of K trees: `torch.stack` at dimension 0.

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
    is_list = isinstance(trees, Iterable) and not isinstance(trees, Mapping | Tensor)
    named = {f"trees[{i}]": tree for i, tree in enumerate(trees)} if is_list else {}
    if not named:
        expected, fix = "a list of at least one tree", "gradkit.tree.stack([first, second])"
        raise StructureError(message("trees", expected, describe(trees), fix))

    def stacked(*row: Tensor) -> Tensor:
        if any(x.is_nested for x in row):
            fix = "a list of trees, or of padded tensors: torch.nested.to_padded_tensor(x, 0.0)"
            raise LeafTypeError(message("trees", "tensors to stack", "nested ones", fix))
        return torch.stack([x.to_dense() for x in row])

    return _unflatten_rows(partial(apply_with_zeros, stacked), *aligned_leaves(named))


def unstack(tree: PyTree) -> list[PyTree]:
    """Return the K trees of which this is the `stack`: `torch.unbind` at dimension 0.

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
    (leaves,), spec = aligned_leaves({"tree": tree})
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
    return [pytree.unflatten(spec, row) for row in zip(*rows, strict=True)]


def aligned_leaves(trees: Mapping[str, PyTree]) -> tuple[list[list[Leaf]], Structure]:
    """Return the leaves of each tree, in the order of the first, and the structure of that."""
    names = list(trees)
    opened, spec = flatten_aligned(list(trees.values()), names.__getitem__)
    if not are_plainly_alike(opened):
        for index, row in enumerate(zip(*opened, strict=True)):
            _check_row(row, names, spec, index)
    return opened, spec


def are_plainly_alike(trees: Sequence[list[Any]]) -> bool:
    """Return whether all leaves are plain tensors, of the same shapes in each tree."""
    if torch.compiler.is_compiling():  # torch.compile takes no map over an attrgetter
        return False
    if not all(PLAIN_TYPES.issuperset(builtins.map(type, leaves)) for leaves in trees):
        return False
    first, *others = trees
    try:
        shapes = list(builtins.map(_shape, first)) if others else []
        return all(list(builtins.map(_shape, leaves)) == shapes for leaves in others)
    except RuntimeError:  # a strided nested tensor has none
        return False


def flatten_aligned(
    trees: Sequence[PyTree], name: Callable[[int], str]
) -> tuple[list[list[Any]], Structure]:
    """Return the leaves of each tree in the order of the first, and the structure of that."""
    for index, tree in enumerate(trees):
        if type(tree) is ClippedGrads:
            got = "a pair (gradients, norm) that was not unpacked"
            fix = "clipped, norm = gradkit.tree.clip_by_global_norm(grads, max_norm)"
            raise StructureError(message(name(index), "a tree of gradients", got, fix))
    # A module in a tree stands for its parameters, an iterator for its items.
    opened = [expand_params(tree, "tree", allow_distributed=True) for tree in trees]
    leaves, spec = opened[0]
    aligned = [leaves]
    for index, (own_leaves, own_spec) in enumerate(opened[1:], 1):
        if own_spec != spec:
            tree = pytree.unflatten(own_spec, own_leaves)
            own_leaves = pytree.flatten_up_to(spec, name(0), tree, name(index))
        aligned.append(own_leaves)
    return aligned, spec


def _check_row(row: Sequence[Any], names: Sequence[str], spec: Structure, index: int) -> None:
    path = partial(pytree.path, spec, index)
    present = [(name, leaf) for name, leaf in zip(names, row, strict=True) if leaf is not None]
    for name, leaf in present:
        if not isinstance(leaf, Tensor):
            fix = "pass a tree of gradients, as gradkit's calls return it"
            raise LeafTypeError(message(path(name), "a tensor or None", describe(leaf), fix))
        like_name, like = present[0]
        shape, of_like = _shape_of(leaf), _shape_of(like)
        if shape != of_like:
            expected = f"the shape of {path(like_name)}, {of_like}"
            fix = "pass gradients of the same parameters"
            raise StructureError(message(path(name), expected, f"{shape}", fix))


def _shape_of(leaf: Tensor) -> tuple[Any, ...]:
    """Return the shape of a tensor; of a strided nested one, which has none, those of its rows."""
    if leaf.is_nested and leaf.layout == torch.strided:
        return tuple(tuple(row.shape) for row in leaf.unbind())
    return tuple(leaf.shape)


def _unflatten_rows(
    fn: Callable[..., Any], trees: Sequence[Sequence[Leaf]], spec: Structure
) -> PyTree:
    """Return a tree of `fn` of one leaf of each tree."""
    return pytree.unflatten(spec, [fn(*row) for row in zip(*trees, strict=True)])


def apply_with_zeros(fn: Callable[..., Any], *row: Leaf) -> Any:
    """Return `fn` of the leaves, zeros in place of None; None where all are None."""
    like = next((leaf for leaf in row if leaf is not None), None)
    if like is None:
        return None
    return fn(*(torch.zeros_like(like) if leaf is None else leaf for leaf in row))
