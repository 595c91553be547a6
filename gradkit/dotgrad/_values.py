"""`.grad` as a value: read, written, cleared."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from gradkit._autograd.passes import ordinary_mode
from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.options import UNUSED, check_option
from gradkit._core.ownership import copy_for, zeros_for
from gradkit._core.pytree import PyTree
from gradkit.dotgrad._pairs import match, read_leaves, unique
from gradkit.errors import (
    UnreachedParamError,
    message,
)


@disable_compile
def read_grads(params: PyTree, *, unused: Literal["none", "zeros", "error"] = "none") -> PyTree:
    """Return copies of what stands in `.grad`.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> (3 * w).sum().backward()
        >>> gradkit.read_grads({"w": w})
        {'w': tensor([3., 3.])}

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.
        unused: What stands for a trainable tensor whose `.grad` is None: `"none"`, `"zeros"` (a
            dense zero) or `"error"`.

    Returns:
        A tree like `params`: of each `.grad` a copy of its shape, dtype, strides and layout,
        without a graph.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves, or `unused` has no such value.
        UnreachedParamError: A trainable tensor has no `.grad`, under `unused="error"`.
        UnsupportedGraphError: A leaf is a parameter that `fully_shard` has gathered.
    """
    check_option("unused", unused, UNUSED)
    wanted = read_leaves(params)
    found: list[Tensor | None] = []
    for index, leaf in enumerate(wanted.leaves):
        grad = None if leaf is None else leaf.grad
        if grad is None and leaf is not None and leaf.requires_grad and unused != "none":
            if unused == "error":
                where = pytree.path(wanted.spec, index, "params")
                do = "call backward() first, or allow it: unused='none'"
                raise UnreachedParamError(message(where, "a tensor with a .grad", "None", do))
            found.append(zeros_for(leaf))
        else:
            with ordinary_mode():
                found.append(None if grad is None else grad.detach().clone())
    return pytree.unflatten(wanted.spec, found)


@disable_compile
def write_grads_(params: PyTree, grads: PyTree) -> None:
    """Set every `.grad` to a copy of the gradient given; None sets None.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradkit.write_grads_({"w": w}, {"w": torch.zeros(2)})
        >>> w.grad
        tensor([0., 0.])

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.
        grads: A tree of its structure: gradients of each tensor's shape, device and
            `grad_dtype or dtype`, dense or sparse, or None. Their graph, if any, is left behind.

    Raises:
        LeafTypeError: A leaf is no leaf tensor, or a gradient is no tensor.
        StructureError: Trees, shapes, dtypes, devices or layouts do not match, or the places of a
            tied tensor hold different gradients. No `.grad` has been changed then.
        UnsupportedGraphError: As in `read_grads`.

    Source:
        The layout is that of `torch::autograd::AccumulateGrad`, as after `.backward()`.
    """
    pairs = match(params, grads)
    with ordinary_mode():
        for leaf, grad in pairs:
            leaf.grad = None if grad is None else copy_for(grad.detach(), leaf)


@disable_compile
def clear_grads_(params: PyTree) -> None:
    """Set every `.grad` to None.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> w.sum().backward()
        >>> gradkit.clear_grads_([w])
        >>> w.grad is None
        True

    Args:
        params: A tree of leaf tensors, modules, iterators, optimizers or None.

    Raises:
        LeafTypeError: A leaf is no leaf tensor.
        StructureError: There are no leaves.
        UnsupportedGraphError: As in `read_grads`.

    Source:
        `torch.optim.Optimizer.zero_grad(set_to_none=True)`.
    """
    for leaf in unique(read_leaves(params).leaves):
        leaf.grad = None
