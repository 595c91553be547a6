"""`capture_grads`: the gradients that code accumulates into `.grad`, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import Tensor

from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.ownership import own
from gradkit._core.pytree import PyTree
from gradkit._state.grad_writes import grads_put_back
from gradkit.dotgrad._matching import read_leaves, unique


class Captured:
    """The gradients that `capture_grads` has captured.

    Attributes:
        grads: A tree like the params of the call; None until the block has ended.
    """

    def __init__(self) -> None:
        self.grads: PyTree = None


@disable_compile
@contextmanager
def capture_grads(params: PyTree) -> Iterator[Captured]:
    """Run code that accumulates into `.grad`, and return those gradients as a value.

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
        An object whose `grads`, after the block, is a tree like `params`: the `.grad` that the
        block left, or None.

    Raises:
        LeafTypeError: A leaf is not a leaf tensor.
        StructureError: There are no leaves.
        UnsupportedGraphError: A leaf is a parameter that `fully_shard` has gathered: enter the
            block before the forward pass.
    """
    opened = read_leaves(params)
    leaves = unique(opened.leaves)
    captured = Captured()
    grads: list[Tensor | None] = []
    with grads_put_back(leaves):
        yield captured
        grads += [_without_base(leaf.grad) for leaf in leaves]
    by_leaf = {id(leaf): _owned([grads.pop()], leaf) for leaf in reversed(leaves)}
    placed: list[Tensor | None] = []
    for leaf in opened.leaves:
        grad = None if leaf is None else by_leaf[id(leaf)]
        tied = any(grad is other for other in placed)
        placed.append(grad.clone() if tied and grad is not None else grad)
    captured.grads = pytree.unflatten(opened.spec, placed)


def _without_base(grad: Tensor | None) -> Tensor | None:
    """Return a copy of a view of a buffer, of which the former `.grad` may be a view, too."""
    return grad if grad is None or grad._base is None else grad.clone()


def _owned(only: list[Tensor | None], leaf: Tensor) -> Tensor | None:
    """Return a gradient, copied if something else than this list refers to it; not its graph."""
    if only[0] is not None and not only[0].requires_grad:
        own(cast("list[Tensor]", only), [leaf])
    return only[0]
