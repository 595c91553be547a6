"""`.grad`, written and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradkit._core.ownership import copy_for


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


def replace_grad(leaf: Tensor, grad: Tensor) -> None:
    """Set `.grad`, in place where both are dense; run post-accumulate-grad hooks as the engine."""
    if leaf.grad is not None and leaf.grad.layout == grad.layout == torch.strided:
        leaf.grad.copy_(grad)
    else:
        leaf.grad = copy_for(grad, leaf)
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
