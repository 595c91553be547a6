"""Writing `.grad`, and putting it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


def set_grad(leaf: Tensor, grad: Tensor | None) -> None:
    """Write the `.grad` of a leaf."""
    leaf.grad = grad


@contextmanager
def grads_put_back(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Start the block with every `.grad` None, and restore the former `.grad` afterwards."""
    before = [leaf.grad for leaf in leaves]
    # One that is part of a buffer, as DistributedDataParallel's views are, is written into.
    values = [None if g is None or g._base is None else g.detach().clone() for g in before]
    try:
        for leaf in leaves:
            set_grad(leaf, None)
        yield
    finally:
        for leaf, grad, value in zip(leaves, before, values, strict=True):
            set_grad(leaf, grad)
            if grad is not None and value is not None:
                grad.detach().copy_(value)
