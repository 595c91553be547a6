"""Writing `.grad`: gradkit assigns to it in this room only."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._compat.autograd import post_accumulate_hooks, storage_address
from gradkit._compat.transforms import detach_keep_tangent
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core.leaf_arithmetic import ARITHMETIC_DTYPES
from gradkit._core.ownership import PLAIN_TYPES, copy_for, overlaps_itself
from gradkit.errors import UnsupportedGraphError, describe, message

_grad, _requires_grad, _version = map(attrgetter, ("grad", "requires_grad", "_version"))
_shape, _dtype, _device, _layout = map(attrgetter, ("shape", "dtype", "device", "layout"))
_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_PLAIN = frozenset({Tensor})
_NONE = frozenset({type(None)})


def write(leaf: Tensor, grad: Tensor | None) -> None:
    """Set `.grad` to a copy of a gradient, without its graph; None sets None."""
    leaf.grad = _copy_for_grad(leaf, grad)


def _copy_for_grad(leaf: Tensor, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else copy_for(detach_keep_tangent(grad), leaf)


def write_all(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Set the `.grad` of each leaf so; one pass over all where every tensor is contiguous."""
    leaves, grads = [leaf for leaf, _ in pairs], [grad for _, grad in pairs]
    if _are_contiguous(leaves, grads):
        set_grads(leaves, list(map(Tensor.clone, cast("list[Tensor]", grads))))
        return
    set_grads(leaves, [_copy_for_grad(leaf, grad) for leaf, grad in pairs])


def _are_contiguous(leaves: Sequence[Tensor], grads: Sequence[Any]) -> bool:
    """Return whether a copy of each gradient has the layout of its leaf, and no graph."""
    return (
        _PLAIN.issuperset(map(type, grads))
        and set(map(_layout, grads)) == {torch.strided}  # only dense leaves have these
        and not any(map(_requires_grad, grads))
        and all(map(_is_contiguous, grads))
        and all(map(_is_contiguous, leaves))
    )


def accumulate_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to `.grad` as `.backward()` does, but without hooks."""
    # An interrupt finds all of them added, or none; but sparse ones, and those of subclasses, are
    # added one by one.
    fresh, dense, others = [], [], []
    for leaf, grad in pairs:
        total = leaf.grad
        if total is None:
            fresh.append((leaf, copy_for(detach_keep_tangent(grad), leaf)))
        elif {type(total), type(grad)} <= PLAIN_TYPES and are_addable([total], [grad]):
            dense.append((leaf, total, detach_keep_tangent(grad)))
        else:
            others.append((leaf, total, grad))
    leaves, totals = [leaf for leaf, _ in fresh], [total for _, total, _ in dense]
    before = list(map(_version, totals))
    try:
        set_grads(leaves, [grad for _, grad in fresh])
        if totals and not add_together(totals, [grad for *_, grad in dense]):
            others = dense + others  # some share memory
    except BaseException:
        if before == list(map(_version, totals)):
            set_grads(leaves, repeat(None))
        raise
    for leaf, total, grad in others:
        leaf.grad = add_to(total, grad)


def add_to(total: Tensor, grad: Tensor) -> Tensor:
    """Return the sum of a `.grad` and a gradient, in the memory of the former."""
    if total.is_sparse and not grad.is_sparse:
        return grad + total  # dense: another object, as in torch
    total += detach_keep_tangent(grad)
    return total


def add_together(totals: list[Any], grads: list[Any]) -> bool:
    """Add to dense `.grad`s gradients that match them, and return True; or do nothing."""
    storages = set(map(storage_address, totals))
    if len(storages) < len(totals) and len(set(map(_address, totals))) < len(totals):
        return False
    if not storages.isdisjoint(map(storage_address, grads)):
        return False  # a gradient might change on the way
    if not _can_be_added_to(totals):
        return False
    # A kernel for all takes a third of the time of one for each, and gives the same bits.
    torch._foreach_add_(totals, grads)
    return True


def _can_be_added_to(totals: Sequence[Tensor]) -> bool:
    """Return whether torch adds to these dense tensors in place."""
    return (
        ARITHMETIC_DTYPES.issuperset(map(_dtype, totals))
        and not any(map(Tensor.is_inference, totals))
        and (all(map(_is_contiguous, totals)) or not any(map(overlaps_itself, totals)))
    )


def are_addable(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether these are dense, and torch can add each gradient to its `.grad` in place."""
    dtypes = list(map(_dtype, totals))
    return (
        {*map(_layout, totals), *map(_layout, grads)} == {torch.strided}
        and dtypes == list(map(_dtype, grads))
        # A `.data` that was set may have another shape or device than the `.grad`.
        and list(map(_shape, totals)) == list(map(_shape, grads))
        and list(map(_device, totals)) == list(map(_device, grads))
        and _can_be_added_to(totals)
    )


def apart_from_grads(
    pairs: Sequence[tuple[Tensor, Tensor | None]],
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the pairs; a gradient that shares memory with some `.grad` is copied."""
    # Adding to that `.grad` would change it.
    totals = {_memory(leaf.grad) for leaf, _ in pairs if leaf.grad is not None}
    return [
        (leaf, grad.clone() if grad is not None and _memory(grad) in totals else grad)
        for leaf, grad in pairs
    ]


def _memory(tensor: Tensor) -> int:
    is_one_storage = type(tensor) in PLAIN_TYPES and tensor.layout == torch.strided
    return storage_address(tensor) if is_one_storage and not tensor.is_nested else id(tensor)


def set_grad(leaf: Tensor, grad: Tensor | None) -> None:
    """Set `.grad` to this very gradient."""
    leaf.grad = grad


def set_grads(leaves: Sequence[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set each `.grad` to this very gradient; torch raises if shape, dtype or device differ."""
    # No interrupt cuts this one call in two.
    deque(map(setattr, leaves, repeat("grad"), grads), 0)


def has_grad(tensor: Tensor) -> bool:
    """Return whether a tensor, which may be no leaf, has a `.grad`."""
    with _warnings, warnings.catch_warnings(), INSIDE:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return tensor.grad is not None


_warnings = Lock()  # threads share the filters


@contextmanager
def grads_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Start a block with every `.grad` None, and restore the former `.grad` after it."""
    before = list(map(_grad, leaves))
    copies: list[tuple[Tensor, Tensor]] = []
    if not set(map(type, before)) <= _NONE:
        _refuse_unassignable(leaves, before)
        # A view of a buffer, as DistributedDataParallel makes them, can be overwritten through it.
        copies = _copies_of_views(leaves, before)
    with undone(partial(_put_back, leaves, before, copies)):
        set_grads(leaves, repeat(None))
        yield


def _put_back(
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    copies: Iterable[tuple[Tensor, Tensor]],
) -> None:
    try:
        set_grads(leaves, grads)
    except RuntimeError:
        # The block has changed a leaf's dtype or device, as `module.double()` does, which casts a
        # .grad, too. A leaf that has another shape by now cannot hold it.
        for leaf, grad in zip(leaves, grads, strict=True):
            try:
                leaf.grad = grad
            except RuntimeError:
                can_be_cast = grad is not None and grad.shape == leaf.shape
                leaf.grad = cast("Tensor", grad).to(leaf) if can_be_cast else None
    for grad, copy in copies:
        grad.detach().copy_(copy)


def _refuse_unassignable(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Raise if no assignment could put a `.grad` back that a leaf holds now."""
    # The engine can leave a dense one of a sparse leaf, or one of a strided nested leaf, of which
    # torch sets none; an assignment to `.data`, one of any kind.
    for leaf, grad in zip(leaves, grads, strict=True):
        try:
            leaf.grad = grad  # the two are one: torch only looks at both
        except RuntimeError as error:
            got, fix = f"{describe(grad)} of {describe(leaf)}", "leaf.grad = None"
            if grad is not None and grad.layout == torch.strided != leaf.layout:
                got = "a dense one of a sparse leaf"
                fix = f"leaf.grad = leaf.grad.to_sparse(), or {fix}"
            expected = "a .grad that can be put back"
            raise UnsupportedGraphError(message("params", expected, got, fix)) from error


def _copies_of_views(
    leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Return each `.grad` that may be overwritten through a buffer around it, and a copy."""
    # A `.grad` that is part of a leaf itself is left out: the block is to change it.
    bases = [(grad, grad._base) for grad in grads if grad is not None]
    views = [grad for grad, base in bases if base is not None]
    views = [grad for grad in views if not (grad.is_nested or overlaps_itself(grad))]
    of_leaves = set(map(_memory, leaves)) if views else set()
    return [(grad, grad.detach().clone()) for grad in views if _memory(grad) not in of_leaves]


def replace_grad(leaf: Tensor, grad: Tensor) -> None:
    """Set `.grad`, in place where both are dense; run post-accumulate-grad hooks as the engine."""
    if leaf.grad is not None and leaf.grad.layout == grad.layout == torch.strided:
        leaf.grad.copy_(grad)
    else:
        write(leaf, grad)
    for hook in list((post_accumulate_hooks(leaf) or {}).values()):
        hook(leaf)


@contextmanager
def grad_dtypes_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Restore every `grad_dtype` afterwards; where it had changed, `.grad` is None."""
    before = [leaf.grad_dtype for leaf in leaves]

    def put_back() -> None:
        for leaf, dtype in zip(leaves, before, strict=True):
            if leaf.grad_dtype != dtype:
                leaf.grad = None  # a gradient must fit
                leaf.grad_dtype = dtype

    with undone(put_back):
        yield
