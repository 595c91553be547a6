"""`capture_grads`: what code that writes `.grad` has left there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.ownership import own
from gradkit._core.pytree import PyTree
from gradkit._state.dot_grad import grads_put_back
from gradkit.dotgrad._pairs import read_leaves, unique


class Captured:
    """What `capture_grads` has captured.

    Attributes:
        grads: A tree like the params of the call; None until the block has ended.
    """

    def __init__(self) -> None:
        self.grads: PyTree = None


@disable_compile
@contextmanager
def capture_grads(params: PyTree) -> Iterator[Captured]:
    """Run code that accumulates into `.grad`, and take what it leaves there as a result.

    The block starts from a clean `.grad`; it may call `.backward()` several times, `zero_grad()`,
    or replace `.grad`. Afterwards, also if it raises, every `.grad` is the object it was before.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> with gradkit.capture_grads({"w": w}) as captured:
        ...     (3 * w).sum().backward()
        >>> captured.grads, w.grad
        ({'w': tensor([3., 3.])}, None)

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.

    Yields:
        An object whose `grads`, after the block, is a tree like `params`: what the block left in
        `.grad`, or None.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves.
        UnsupportedGraphError: A leaf is a parameter that `fully_shard` has gathered: enter the
            block before the forward pass.
    """
    wanted = read_leaves(params)
    leaves = unique(wanted.leaves)
    captured = Captured()
    found: list[Tensor | None] = []
    with grads_put_back(leaves):
        yield captured
        found += [_apart(leaf.grad) for leaf in leaves]
    _own(found, leaves)
    by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, found, strict=True)}
    del found
    places: list[Tensor | None] = []
    for leaf in wanted.leaves:
        grad = None if leaf is None else by_leaf[id(leaf)]
        tied = grad is not None and any(grad is other for other in places)
        places.append(grad.clone() if tied and grad is not None else grad)
    captured.grads = pytree.unflatten(wanted.spec, places)


def _apart(grad: Tensor | None) -> Tensor | None:
    """Return a copy of a part of a buffer, which what is put back may be a part of, too."""
    return grad if grad is None or grad._base is None else grad.clone()


def _own(grads: list[Tensor | None], leaves: list[Tensor]) -> None:
    """Copy the gradients that something else refers to; a graph stays as it is."""
    for index, leaf in enumerate(leaves):
        grad = grads[index]
        if grad is not None and not grad.requires_grad:
            grads[index] = None
            lone = [grad]
            del grad
            own(lone, [leaf])
            grads[index] = lone.pop()
