"""Sums and averages of trees in the memory of the first: no second set of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import is_number, number_for_torch
from gradkit._core.leaf_arithmetic import ARITHMETIC_DTYPES, why_it_fails
from gradkit._core.ownership import PLAIN_TYPES, overlaps_itself, shared_by
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)
from gradkit.tree._arithmetic import Leaf, aligned_leaves, are_dense, are_of_one_kind, group_alike

# The function gets the name of a tree, and returns the path of a leaf in it.
_Path: TypeAlias = Callable[[str], str]
_requires_grad = attrgetter("requires_grad")
# torch raises for a number that is out of the range of the tensors.
_FITS_ALL_DTYPES = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class _InPlaceOperation:
    """What is done to two leaves, or to one where the other is None."""

    name: str  # of the second tree
    both: Callable[[list[Tensor], list[Tensor]], object]  # the first: of one device, dtype, layout
    first: Callable[[Tensor], Tensor]  # in place
    second: Callable[[Tensor], Tensor]  # to a new tensor
    number: float
    sparse: bool  # whether the first tensor may be, if the second is

    def on_copies(self, x: Leaf, y: Leaf) -> None:
        """Run it on copies of two leaves."""
        if x is not None and y is not None:
            self.both([x.clone()], [y])
        elif x is not None:
            self.first(x.clone())
        elif y is not None:
            self.second(y)


def _run_in_place(operation: _InPlaceOperation, tree: PyTree, other: PyTree) -> PyTree:
    """Change the tensors of a tree by those of another one, or raise before anything is changed."""
    if transforms():
        expected = "a call outside of torch.func's transforms"
        fix = "gradkit.tree.add, which is pure"
        raise UnsupportedGraphError(message("tree", expected, "one inside", fix))
    leaves, spec = aligned_leaves({"tree": tree, operation.name: other})
    rows = list(zip(*leaves, strict=True))
    for index, (x, y) in enumerate(() if _plainly_fit(leaves, operation) else rows):
        _check_leaves(x, y, operation, partial(pytree.path, spec, index))
    set_entries = _entries(tree, rows, spec)
    _refuse_shared_memory(rows, spec, operation.name)
    pairs = [(x, y) for x, y in rows if x is not None and y is not None]
    for indices in group_alike([x for x, _ in pairs]).values():
        operation.both([pairs[i][0] for i in indices], [pairs[i][1] for i in indices])
    for x, y in rows:
        if x is not None and y is None:
            operation.first(x)
    for set_entry, leaf in set_entries:
        set_entry(operation.second(leaf))
    return tree


def _plainly_fit(by_tree: Sequence[list[Any]], operation: _InPlaceOperation) -> bool:
    """Return whether all leaves are ordinary tensors of one kind that no graph records."""
    leaves = [leaf for column in by_tree for leaf in column]
    return (
        are_dense(leaves)
        and are_of_one_kind(leaves)
        and abs(operation.number) <= _FITS_ALL_DTYPES
        and not (torch.is_grad_enabled() and any(map(_requires_grad, leaves)))
        and not any(map(Tensor.is_inference, by_tree[0]))
    )


def _check_leaves(x: Leaf, y: Leaf, operation: _InPlaceOperation, path: _Path) -> None:
    """Raise if a leaf cannot be changed by another one."""
    for root, leaf in (("tree", x), (operation.name, y)):
        if leaf is None:
            continue
        if not leaf.is_floating_point() and not leaf.is_complex():
            fix = "leave integers out: gradients are none"
            raise LeafTypeError(message(path(root), DIFFERENTIABLE, describe(leaf), fix))
        if leaf.requires_grad and torch.is_grad_enabled():
            expected = "a tensor that does not require grad, as a change in place is not recorded"
            fix = "with torch.no_grad(): around the call; or gradkit.tree.add, which is recorded"
            raise UnsupportedGraphError(message(path(root), expected, "one that does", fix))
    if x is not None:
        _check_memory(x, y, operation, path)
    _check_kernel(x, y, operation, path)


def _check_memory(x: Tensor, y: Leaf, operation: _InPlaceOperation, path: _Path) -> None:
    """Raise if a tensor cannot hold the result."""
    # torch.compile cannot tell whether a tensor was made in inference mode.
    is_inference = not torch.compiler.is_compiling() and x.is_inference()
    if is_inference and not torch.is_inference_mode_enabled():
        expected, got = "a tensor that can be changed in place", "one made in inference mode"
        raise StructureError(message(path("tree"), expected, got, "clone it"))
    if y is not None:
        alike = x.device == y.device and is_dtensor(x) == is_dtensor(y)
        if not alike or not _is_as_precise(x.dtype, y.dtype):
            expected = f"what can be added to {describe(x)}"
            fix = "gradkit.tree.map(lambda x: x.to(device, dtype), other)"
            raise StructureError(message(path(operation.name), expected, describe(y), fix))
    may_be_sparse = operation.sparse and (y is None or y.layout == x.layout)
    is_dense = x.layout == torch.strided and not x.is_nested
    if not (is_dense or (may_be_sparse and x.layout != torch.strided)):
        got = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        fix = "gradkit.tree.add"
        fix += "" if x.is_nested else "; or gradkit.tree.map(torch.Tensor.to_dense, tree)"
        raise StructureError(message(path("tree"), "a dense tensor", got, fix))


def _is_as_precise(dtype: torch.dtype, other: torch.dtype) -> bool:
    if dtype == other:
        return True
    # promote_types raises for float8.
    return min(dtype.itemsize, other.itemsize) > 1 and torch.promote_types(dtype, other) == dtype


def _check_kernel(x: Leaf, y: Leaf, operation: _InPlaceOperation, path: _Path) -> None:
    """Raise if torch does not have the operation for such leaves."""
    present = [leaf for leaf in (x, y) if leaf is not None]
    is_ordinary = (
        ARITHMETIC_DTYPES.issuperset([leaf.dtype for leaf in present])
        and (x is None or x.layout == torch.strided)
        and (y is None or y.layout in (torch.strided, torch.sparse_coo))
        and abs(operation.number) <= _FITS_ALL_DTYPES
    )
    if is_ordinary or torch.compiler.is_compiling():
        return
    reason = why_it_fails(lambda: operation.on_copies(x, y))
    if reason is not None:
        where = path(operation.name if x is None else "tree")
        got = f"{describe(present[0])} of layout {present[0].layout}, of which torch says: {reason}"
        fix = "both trees as dense float32: gradkit.tree.map(lambda x: x.to_dense().float(), tree)"
        raise StructureError(message(where, "a tensor that torch can change so", got, fix))


def _entries(
    tree: PyTree, rows: Sequence[Sequence[Leaf]], spec: Structure
) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """Return what sets an entry of the first tree that is None, and the second's tensor there."""
    entries: dict[tuple[int, object], tuple[Callable[[Tensor], None], Tensor]] = {}
    for index, (x, y) in enumerate(rows):
        if x is not None or y is None:
            continue
        container, key = pytree.mutable_entry(tree, spec, index) or (None, None)
        if container is None or (id(container), key) in entries:
            where = pytree.path(spec, index, "tree")
            expected = "a tensor, or None in a list or dict of its own"
            fix = (
                "gradkit.tree.add, which returns a new tree; or start with gradkit.tree.zeros_like"
            )
            raise StructureError(message(where, expected, "None, which cannot be set here", fix))
        entries[id(container), key] = partial(container.__setitem__, key), y
    return list(entries.values())


_OWN = "a tensor with memory of its own"


def _refuse_shared_memory(rows: Sequence[Sequence[Leaf]], spec: Structure, name: str) -> None:
    """Raise if a change of one leaf would change another one, which is still to be read."""
    if torch.compiler.is_compiling():  # there are no addresses yet
        return
    indices = [index for index, (x, _) in enumerate(rows) if _has_address(x)]
    written = [cast("Tensor", rows[index][0]) for index in indices]
    read = [rows[index][1] for index in indices]
    for index, x in zip(indices, written, strict=True):
        if overlaps_itself(x):
            got, fix = "an expanded one, whose entries share theirs", "pass a clone of it"
            raise StructureError(message(pytree.path(spec, index, "tree"), _OWN, got, fix))
    shared = shared_by(written, [y if _has_address(y) else None for y in read])
    if shared is not None:
        first, second = shared
        root = "tree" if second < len(written) else name
        got = f"one in the memory of {pytree.path(spec, indices[second % len(written)], root)}"
        where, fix = pytree.path(spec, indices[first], "tree"), "pass clones; a tied tensor once"
        raise StructureError(message(where, _OWN, got, fix))


def _has_address(leaf: Leaf) -> bool:
    # A subclass may have several storages, or none; of what is not dense nobody has a view.
    return type(leaf) in PLAIN_TYPES and cast("Tensor", leaf).layout == torch.strided


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
    """
    by = _number("alpha", alpha)

    def add(xs: list[Tensor], ys: list[Tensor]) -> None:
        if {(y.dtype, y.layout) for y in ys} == {(xs[0].dtype, torch.strided)}:
            torch._foreach_add_(xs, ys, alpha=by)
        else:
            for x, y in zip(xs, ys, strict=True):
                x.add_(y, alpha=by)

    operation = _InPlaceOperation("other", add, lambda x: x, lambda y: y * by, by, sparse=True)
    return _run_in_place(operation, tree, other)


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

    operation = _InPlaceOperation(
        "end", lerp, lambda x: x.mul_(1 - by), lambda y: y * by, by, sparse=False
    )
    return _run_in_place(operation, tree, end)


def _number(name: str, value: object) -> float:
    """Return a number for torch; raise if this is none."""
    if not is_number(value):
        fix = f"{name}=0.5; or {name}=float({name}), of a tensor"
        raise OptionError(message(name, "a real number", describe(value), fix))
    return cast("float", number_for_torch(value))
