"""Where the batch dimension of the arguments is, as in torch.vmap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.func._arguments import Arguments
from gradkit.func._aux import is_constant


@dataclass(frozen=True)
class Batch:
    """The leaves of the arguments, and which of them are batched.

    Attributes:
        leaves: All leaves of the positional arguments.
        by_leaf: The batch dimension of each; None for one that is not batched.
        spec: The structure of the arguments.
        size: The number of samples.
    """

    leaves: list[Any]
    by_leaf: list[int | None]
    spec: Structure
    size: int

    @property
    def tensors(self) -> list[Tensor]:
        """The batched tensors."""
        pairs = zip(self.leaves, self.by_leaf, strict=True)
        return [leaf for leaf, dim in pairs if dim is not None]

    @property
    def dims(self) -> tuple[int, ...]:
        """The batch dimension of each batched tensor."""
        return tuple(dim for dim in self.by_leaf if dim is not None)

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """Return the arguments with other tensors in place of the batched ones."""
        rest = iter(tensors)
        pairs = zip(self.leaves, self.by_leaf, strict=True)
        leaves = [leaf if dim is None else next(rest) for leaf, dim in pairs]
        args: tuple[Any, ...] = pytree.unflatten(self.spec, leaves)
        return args

    def first_sample(self) -> tuple[Any, ...]:
        """Return the arguments of the first sample."""
        pairs = zip(self.tensors, self.dims, strict=True)
        return self.with_tensors(tensor.select(dim, 0) for tensor, dim in pairs)


def read_batch(arguments: Arguments, in_dims: PyTree, kwargs: dict[str, Any]) -> Batch:
    """Check which arguments are batched, and return them."""
    leaves, spec = pytree.flatten(arguments.args)
    dims = _read_dims(in_dims, arguments.args, arguments.positions)
    size = _size_of_batch(leaves, dims, spec)
    _refuse_unbatched(leaves, dims, spec, kwargs)
    _refuse_two_dims(arguments, pytree.unflatten(spec, dims))
    return Batch(leaves, dims, spec, size)


def _refuse_unbatched(
    leaves: list[Any], dims: list[int | None], spec: Structure, kwargs: dict[str, Any]
) -> None:
    """Raise for what every sample would get unbatched, though it may hold the batch."""
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None and not isinstance(leaf, Tensor) and not is_constant(leaf):
            raise LeafTypeError(
                message(
                    pytree.path(spec, index, "args"),
                    "a tensor, or a constant: a number, text, a function, a module",
                    f"{describe(leaf)}, which is no tree that optree knows",
                    "pass tensors; register the class: optree.register_pytree_node",
                )
            )
    for name, value in kwargs.items():
        if any(isinstance(leaf, Tensor) for leaf in pytree.flatten(value)[0]):
            raise StructureError(
                message(
                    name,
                    "tensors in positional arguments, where in_dims says how they are batched",
                    "a keyword argument with a tensor",
                    "per_sample_grads(fn, in_dims=...)(params, x, y), all by position",
                )
            )


def _refuse_two_dims(arguments: Arguments, dims: PyTree) -> None:
    by_leaf, _ = pytree.flatten(tuple(dims[position] for position in arguments.positions))
    first: dict[int, int | None] = {}
    for slot, dim in zip(arguments.params.slots, by_leaf, strict=True):
        if slot is not None and first.setdefault(slot, dim) != dim:
            raise StructureError(
                message(
                    "in_dims",
                    "one batch dimension for a tensor, wherever it stands",
                    f"{first[slot]} and {dim} for one tensor in two places",
                    "pass a copy: tensor.clone()",
                )
            )


def _read_dims(
    in_dims: PyTree, args: tuple[Any, ...], differentiated: tuple[int, ...]
) -> list[int | None]:
    """Return for each leaf of the arguments its batch dimension, None for none."""
    if in_dims is None:
        return [
            0 if isinstance(leaf, Tensor) and position not in differentiated else None
            for position, arg in enumerate(args)
            for leaf in pytree.flatten(arg)[0]
        ]
    by_arg = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
    if not isinstance(by_arg, tuple | list) or len(by_arg) != len(args):
        raise StructureError(
            message(
                "in_dims",
                f"an int, or a tuple of {len(args)}, one entry for each positional argument",
                describe(in_dims),
                f"in_dims={(None, *[0] * (len(args) - 1))}",
            )
        )
    return [
        None if leaf is None else dim
        for position, (entry, arg) in enumerate(zip(by_arg, args, strict=True))
        for leaf, dim in zip(
            pytree.flatten(arg)[0],
            pytree.broadcast_prefix(entry, f"in_dims[{position}]", arg, f"args[{position}]"),
            strict=True,
        )
    ]


def _size_of_batch(leaves: list[Any], dims: list[int | None], spec: Structure) -> int:
    sizes: dict[int, int] = {}
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        fits = isinstance(leaf, Tensor) and isinstance(dim, int) and not isinstance(dim, bool)
        if not fits or not -leaf.dim() <= dim < leaf.dim():
            raise StructureError(
                message(
                    pytree.path(spec, index, "args"),
                    f"a tensor with the batch dimension {dim!r}",
                    describe(leaf),
                    "give in_dims, with None for what is not batched: in_dims=(None, 0, None)",
                )
            )
        sizes.setdefault(leaf.shape[dim], index)
    if list(sizes) == [0]:
        raise StructureError(
            message(
                pytree.path(spec, sizes[0], "args"),
                "a batch of at least one sample",
                "an empty one",
                "skip it: it has no gradients",
            )
        )
    if len(sizes) == 1:
        return next(iter(sizes))
    if not sizes:
        raise StructureError(
            message(
                "args",
                "at least one batched tensor",
                "none",
                "pass the samples as an argument, or name their dimension in in_dims",
            )
        )
    (size, first), (other, index), *_ = sizes.items()
    raise StructureError(
        message(
            pytree.path(spec, index, "args"),
            f"a batch of {size}, as {pytree.path(spec, first, 'args')} has",
            f"one of {other}",
            "pass as many targets as inputs, or give in_dims, with None for what is not batched",
        )
    )
