"""`.grad`, put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def grads_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Start the block with every `.grad` None, and restore the former `.grad` afterwards."""
    before = [leaf.grad for leaf in leaves]
    # One that is part of a buffer, as DistributedDataParallel's views are, is written into.
    numbers = [None if g is None or g._base is None else g.detach().clone() for g in before]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, grad, kept in zip(leaves, before, numbers, strict=True):
            leaf.grad = grad
            if grad is not None and kept is not None:
                grad.detach().copy_(kept)


@contextmanager
def grad_dtypes_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Restore every `grad_dtype` afterwards; where it had changed, `.grad` is None."""
    before = [leaf.grad_dtype for leaf in leaves]
    try:
        yield
    finally:
        for leaf, dtype in zip(leaves, before, strict=True):
            if leaf.grad_dtype != dtype:
                leaf.grad = None  # it must fit
                leaf.grad_dtype = dtype


def copy_into_grads(leaves: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Set every `.grad` to a copy of a gradient; one that is None changes nothing."""
    for leaf, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            leaf.grad = grad.detach().clone()
