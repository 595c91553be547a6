"""Trees of new tensors, zeros or random numbers, of the shapes of another tree."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor, sharded_like
from gradkit._core import pytree
from gradkit._core.params import DIFFERENTIABLE
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, OptionError, describe, message
from gradkit.tree._arithmetic import Leaf, aligned_leaves, map


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

    Raises:
        LeafTypeError: A leaf is not a tensor.
        OptionError: `dtype` is none.

    Source:
        `torch.zeros_like`
    """
    _check_type("dtype", dtype, torch.dtype, "dtype=torch.float32")
    return map(partial(torch.zeros_like, dtype=dtype), tree)


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
        OptionError: `generator` is none.

    Source:
        `torch.randn_like`
    """
    fix = "generator=torch.Generator().manual_seed(0)"
    _check_type("generator", generator, torch.Generator, fix)
    (leaves,), spec = aligned_leaves({"tree": tree})
    for index, leaf in enumerate(leaves):
        if leaf is not None and not leaf.is_floating_point() and not leaf.is_complex():
            where, fix = pytree.path(spec, index, "tree"), "put None in its place"
            raise LeafTypeError(message(where, DIFFERENTIABLE, describe(leaf), fix))
    drawn: dict[int, Tensor] = {}
    result: list[Leaf] = []
    for leaf in leaves:
        if leaf is None:
            result.append(None)
        elif id(leaf) in drawn:
            result.append(drawn[id(leaf)].clone())
        else:
            drawn[id(leaf)] = _normal(leaf, generator)
            result.append(drawn[id(leaf)])
    return pytree.unflatten(spec, result)


def _check_type(name: str, value: object, kind: type, fix: str) -> None:
    if value is not None and not isinstance(value, kind):
        expected = f"a torch.{kind.__name__} or None"
        raise OptionError(message(name, expected, describe(value), fix))


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    if is_dtensor(like) and generator is None:
        return torch.randn_like(like)  # whose shards differ
    numbers = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return sharded_like(numbers, like) if is_dtensor(like) else numbers
