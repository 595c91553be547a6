"""The gradients of several losses, as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message

# How many numbers of a row are put together at most.
_TOGETHER = 1 << 18
# Below this many numbers, a leaf is put together with others: a copy costs less than a product.
_SMALL = 1 << 14


@dataclass(frozen=True, slots=True)
class Rows:
    """The gradients of several losses: `rows[k][i]` is leaf i of loss k, or None.

    Attributes:
        rows: One list of leaves for each loss; for each element of a loss that is no scalar.
        counts: How many rows each loss has.
        unflatten: Puts leaves together to a tree of gradients.
    """

    rows: list[list[Tensor | None]]
    counts: list[int]
    unflatten: Callable[[Sequence[Tensor | None]], PyTree]

    def example(self, leaf: int) -> Tensor | None:
        """Return some row's gradient for a leaf, or None if every row is zero there."""
        return next((row[leaf] for row in self.rows if row[leaf] is not None), None)

    @property
    def leaves(self) -> range:
        """The places in a row."""
        return range(len(self.rows[0]))


def read_rows(per_loss: PyTree, losses: PyTree | None) -> Rows:
    """Take a tree of losses of trees of gradients apart.

    Args:
        per_loss: What `per_loss_grads` returns.
        losses: A tree of the structure of the losses, where that is deeper than one level, or
            where a loss is no scalar: then the losses themselves.

    Returns:
        Its rows.

    Raises:
        LeafTypeError: A gradient is no tensor.
        StructureError: There are no losses, or their gradients do not match.
    """
    if losses is None:
        trees, _ = pytree.children(per_loss)
        shapes: list[tuple[int, ...]] = [()] * len(trees)
    else:
        given, spec = pytree.flatten(losses)
        trees = pytree.flatten_up_to(spec, "losses", per_loss, "per_loss")
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in given]
    if not trees or (losses is None and trees[0] is per_loss):
        raise StructureError(
            message(
                "per_loss",
                "the gradients of at least one loss, with the losses as its top level",
                "none",
                "pass what per_loss_grads returned; for a lone loss, give losses=",
            )
        )
    _, spec = pytree.flatten(trees[0])
    rows: list[list[Tensor | None]] = []
    for tree, shape in zip(trees, shapes, strict=True):
        leaves = pytree.flatten_up_to(spec, "the first loss's gradients", tree, "per_loss")
        rows += _split(leaves, shape)
    if not rows:
        do = "leave out losses without elements"
        raise StructureError(message("losses", "at least one element", "none", do))
    found = Rows(rows, [torch.Size(shape).numel() for shape in shapes], spec.unflatten)
    _check_shapes(found)
    return found


def _split(leaves: list[Tensor | None], shape: tuple[int, ...]) -> list[list[Tensor | None]]:
    if not shape:
        return [leaves]
    count = torch.Size(shape).numel()
    leaves = [x if x is None or x.layout == torch.strided else x.to_dense() for x in leaves]
    split = [
        [None] * count if leaf is None else leaf.reshape(count, *leaf.shape[len(shape) :]).unbind()
        for leaf in leaves
    ]
    return [list(row) for row in zip(*split, strict=True)]


def _check_shapes(rows: Rows) -> None:
    for leaf in rows.leaves:
        present: list[Any] = [x for row in rows.rows if (x := row[leaf]) is not None]
        for x in present:
            if not isinstance(x, Tensor):
                do = "pass what per_loss_grads returned"
                where = f"leaf {leaf} of per_loss"
                raise LeafTypeError(message(where, "a tensor or None", describe(x), do))
        shapes = {tuple(x.shape) for x in present}
        if len(shapes) > 1:
            raise StructureError(
                message(
                    f"leaf {leaf} of per_loss",
                    "one shape for all losses",
                    " and ".join(map(str, sorted(shapes))),
                    "give losses=, the losses themselves, if one of them is no scalar",
                )
            )


def are_ordinary(rows: Rows) -> bool:
    """Return whether all leaves are there, plain, of one dtype and on one device.

    Then many leaves can be taken at a time: one by one, small ones cost more than their numbers.
    """
    if transforms():
        return False
    leaves = list(chain.from_iterable(rows.rows))
    if set(map(type, leaves)) != {Tensor}:
        return False
    kinds = {(x.dtype, x.device, x.layout) for x in leaves if x is not None}
    return (
        len(kinds) == 1
        and next(iter(kinds))[0] in _SUMMED_AS_THEY_ARE
        and all(x.layout == torch.strided for x in leaves if x is not None)
    )


_SUMMED_AS_THEY_ARE = (torch.float32, torch.float64)


def in_groups(rows: Rows) -> list[list[int]]:
    """Return the leaves of ordinary rows in groups: large ones alone, small ones together."""
    groups: list[list[int]] = []
    small: list[int] = []
    size = 0
    for leaf in rows.leaves:
        numel = cast("Tensor", rows.rows[0][leaf]).numel()
        if numel > _SMALL:
            groups.append([leaf])
            continue
        small.append(leaf)
        size += numel
        if size > _TOGETHER:
            groups.append(small)
            small, size = [], 0
    return [*groups, small] if small else groups


def as_vectors(rows: Rows, group: list[int]) -> list[Tensor]:
    """Return for each ordinary row some of its leaves as one vector."""
    if len(group) == 1:
        return [cast("Tensor", row[group[0]]).reshape(-1) for row in rows.rows]
    picked = [[cast("Tensor", row[leaf]) for leaf in group] for row in rows.rows]
    return [_flatten_dense_tensors(row) for row in picked]  # type: ignore[no-untyped-call]
