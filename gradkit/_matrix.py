"""Per-loss gradients as rows: their matrix, their Gramian, and one gradient out of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from gradkit import _pytree
from gradkit._leaf import from_real_vector, plus, real_vector, width
from gradkit._pytree import PyTree
from gradkit._stack import transforms
from gradkit.errors import LeafTypeError, StructureError, describe, message

# How many columns of the matrix are in memory at a time, while its Gramian is summed up.
_COLUMNS_AT_A_TIME = 1 << 18
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
        trees, _ = _pytree.children(per_loss)
        shapes: list[tuple[int, ...]] = [()] * len(trees)
    else:
        given, spec = _pytree.flatten(losses)
        trees = _pytree.matching_leaves(spec, "losses", per_loss, "per_loss")
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
    _, spec = _pytree.flatten(trees[0])
    rows: list[list[Tensor | None]] = []
    for tree, shape in zip(trees, shapes, strict=True):
        leaves = _pytree.matching_leaves(spec, "the first loss's gradients", tree, "per_loss")
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


def to_matrix(
    per_loss: PyTree, *, losses: PyTree | None = None
) -> tuple[Tensor, Callable[[Tensor], PyTree]]:
    """Return the gradients as one matrix, a row a loss, and the way back for a vector.

    Example:
        >>> import torch, gradkit
        >>> matrix, unravel = gradkit.tree.to_matrix({"a": {"w": torch.ones(2)}, "b": {"w": None}})
        >>> matrix
        tensor([[1., 1.],
                [0., 0.]])
        >>> unravel(matrix.sum(0))
        {'w': tensor([1., 1.])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        losses: A tree with the structure of the losses, where it is deeper; the losses themselves
            where one is no scalar, whose elements are rows then.

    Returns:
        `(matrix, unravel)`. `matrix`: `[K, n]`, the leaves in order, in their common dtype, float32
        at least; a complex entry is two columns; a leaf that is None for every loss has none.
        `unravel`: from `[n]` to a tree like a loss's gradients, in their dtypes, None where it is
        None for every loss.

    Raises:
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    likes = [rows.example(leaf) for leaf in rows.leaves]
    present = [leaf for leaf, like in enumerate(likes) if like is not None]
    widths = [width(like) for like in likes if like is not None]
    if not present:
        return torch.zeros(len(rows.rows), 0), lambda vector: rows.unflatten(likes)

    def as_vector(row: list[Tensor | None]) -> Tensor:
        parts = [_vector_or_zeros(row[leaf], likes[leaf]) for leaf in present]
        dtype = _common_dtype(parts)
        return torch.cat([part.to(parts[0].device, dtype) for part in parts])

    def unravel(vector: Tensor) -> PyTree:
        if vector.shape != (sum(widths),):
            do = "reduce the matrix over its rows: matrix.mean(0)"
            wanted = f"a vector of shape ({sum(widths)},)"
            raise StructureError(message("unravel", wanted, f"{tuple(vector.shape)}", do))
        leaves: list[Tensor | None] = [None] * len(likes)
        for leaf, part in zip(present, torch.split(vector, widths), strict=True):
            like = likes[leaf]
            assert like is not None
            leaves[leaf] = from_real_vector(part.to(like.device), like).clone()
        return rows.unflatten(leaves)

    return torch.stack([as_vector(row) for row in rows.rows]), unravel


def _vector_or_zeros(leaf: Tensor | None, like: Tensor | None) -> Tensor:
    if leaf is not None:
        return real_vector(leaf)
    assert like is not None
    return real_vector(torch.zeros_like(like, layout=torch.strided))


def _common_dtype(parts: Sequence[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return dtype


def gram(per_loss: PyTree, *, losses: PyTree | None = None) -> Tensor:
    """Return the inner products of the losses' gradients, without building their matrix.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.gram([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 3.0])}])
        tensor([[5., 6.],
                [6., 9.]])

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        losses: As in `to_matrix`.

    Returns:
        `[K, K]`, symmetric, on the device of the first leaf, in the leaves' common dtype, float32
        at least: `matrix @ matrix.T` for the matrix of `to_matrix`.

    Raises:
        StructureError: There are no losses, or their gradients do not match.
    """
    rows = read_rows(per_loss, losses)
    count = len(rows.rows)
    total: Tensor | None = None
    if _are_ordinary(rows):
        total = _gram_of_ordinary(rows)
        return total.triu() + total.triu(1).T
    for leaf in rows.leaves:
        present = [index for index, row in enumerate(rows.rows) if row[leaf] is not None]
        if not present:
            continue
        vectors = [real_vector(x) for row in rows.rows if (x := row[leaf]) is not None]
        part = _gram_of_vectors(vectors)
        if len(present) < count:
            places = torch.tensor(present, device=part.device)
            whole = part.new_zeros(count, count)
            part = whole.index_put((places[:, None], places[None, :]), part)
        total = part if total is None else total + part.to(total.device)
    if total is None:
        return torch.zeros(count, count)
    return total.triu() + total.triu(1).T  # symmetric to the bit, which a product need not be


def _are_ordinary(rows: Rows) -> bool:
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


def _gram_of_ordinary(rows: Rows) -> Tensor:
    parts = [_gram_of_vectors(_vectors(rows, group)) for group in _groups(rows)]
    return torch.stack(parts).sum(0)


def _groups(rows: Rows) -> list[list[int]]:
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
        if size > _COLUMNS_AT_A_TIME:
            groups.append(small)
            small, size = [], 0
    return [*groups, small] if small else groups


def _vectors(rows: Rows, group: list[int]) -> list[Tensor]:
    """Return for each ordinary row some of its leaves as one vector."""
    if len(group) == 1:
        return [cast("Tensor", row[group[0]]).reshape(-1) for row in rows.rows]
    picked = [[cast("Tensor", row[leaf]) for leaf in group] for row in rows.rows]
    return [_flatten_dense_tensors(row) for row in picked]  # type: ignore[no-untyped-call]


def _gram_of_vectors(vectors: list[Tensor]) -> Tensor:
    dtype = _common_dtype(vectors)
    total: Tensor | None = None
    for start in range(0, max(1, vectors[0].numel()), _COLUMNS_AT_A_TIME):
        block = torch.stack([v[start : start + _COLUMNS_AT_A_TIME].to(dtype) for v in vectors])
        with torch.autocast(block.device.type, enabled=False):  # it would take half precision
            part = block @ block.T
        total = part if total is None else total + part
    assert total is not None
    return total


def weighted_sum(
    per_loss: PyTree, weights: PyTree = None, *, losses: PyTree | None = None
) -> PyTree:
    """Return the weighted sum of the losses' gradients, added in the order of the losses.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": None}}
        >>> gradkit.tree.weighted_sum(per_loss, {"a": 0.5, "b": 2.0})
        {'w': tensor([0.5000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        weights: Numbers or tensors in the structure of the losses, or a prefix of it; or a tensor
            of K weights. None is all ones.
        losses: As in `to_matrix`.

    Returns:
        A tree like a loss's gradients, in their dtypes; None where it is None for every loss.

    Raises:
        LeafTypeError: A weight is no real number.
        StructureError: There are no losses, or trees do not match.
    """
    rows = read_rows(per_loss, losses)
    by_row = _row_weights(per_loss, weights, losses, rows)
    if _are_ordinary(rows) and not any(
        x.requires_grad for x in chain(by_row, *rows.rows) if isinstance(x, Tensor)
    ):
        return rows.unflatten(_sum_of_ordinary(rows, by_row))
    total: list[Tensor | None] = [None] * len(rows.leaves)
    for row, weight in zip(rows.rows, by_row, strict=True):
        scaled = row if weight is None else [_times(leaf, weight) for leaf in row]
        total = [plus(a, b) for a, b in zip(total, scaled, strict=True)]
    return rows.unflatten(total)


def _sum_of_ordinary(rows: Rows, weights: Sequence[Any]) -> list[Tensor | None]:
    """Add group by group: the same sums, in the same order."""
    found: list[Tensor | None] = [None] * len(rows.leaves)
    for group in _groups(rows):
        total: Tensor | None = None
        for vector, weight in zip(_vectors(rows, group), weights, strict=True):
            scaled = vector if weight is None else _times(vector, weight)
            total = plus(None, scaled) if total is None else total.add_(cast("Tensor", scaled))
        likes = [cast("Tensor", rows.rows[0][leaf]) for leaf in group]
        parts = torch.split(cast("Tensor", total), [like.numel() for like in likes])
        for leaf, part, like in zip(group, parts, likes, strict=True):
            found[leaf] = torch.empty_like(like).copy_(part.view(like.shape))
    return found


def _row_weights(per_loss: PyTree, weights: PyTree, losses: PyTree | None, rows: Rows) -> list[Any]:
    count = len(rows.rows)
    if weights is None:
        return [None] * count
    if isinstance(weights, Tensor) and weights.dim() == 1:
        weights_of_rows: list[Any] = list(weights)
        if len(weights_of_rows) != count:
            raise StructureError(
                message("weights", f"{count} weights", f"{len(weights)}", "one for each loss")
            )
        return [_scalar(weight) for weight in weights_of_rows]
    if losses is None:
        level, unflatten = _pytree.children(per_loss)
        losses = unflatten([0.0] * len(level))
    spread = _pytree.spread(weights, "weights", losses, "losses")
    found: list[Any] = []
    for weight, repeat in zip(spread, rows.counts, strict=True):
        if isinstance(weight, Tensor) and weight.numel() == repeat != 1:
            found += [_scalar(one) for one in weight.reshape(-1)]
        else:
            found += [_scalar(weight)] * repeat
    return found


def _scalar(weight: object) -> float | Tensor:
    """Return the weight of one row, checked: a real number, or a 0-dim tensor of one."""
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        return weight.reshape(())
    if isinstance(weight, Real):
        return cast("float", weight)
    raise LeafTypeError(
        message(
            "weights",
            "a real number or a real tensor of one element for each loss",
            describe(weight),
            "weights=dict(zip(losses, weights)) for a tensor of several",
        )
    )


def _times(leaf: Tensor | None, weight: float | Tensor) -> Tensor | None:
    if leaf is None:
        return None
    if isinstance(weight, Tensor):
        weight = weight.to(leaf.device)
    return (leaf * weight).to(leaf.dtype)


def combine(
    per_loss: PyTree,
    aggregator: Callable[[Tensor], Tensor] | PyTree,
    *,
    losses: PyTree | None = None,
) -> PyTree:
    """Return one gradient made of several losses' gradients.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": torch.tensor([3.0, 0.0])}}
        >>> gradkit.combine(per_loss, lambda matrix: matrix.mean(0))
        {'w': tensor([2.0000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        aggregator: From the matrix `[K, n]` of `to_matrix` to a vector `[n]`: a TorchJD aggregator
            as it is, say. Or weights, as in `weighted_sum`, which builds no matrix.
        losses: As in `to_matrix`.

    Returns:
        A tree like a loss's gradients, in their dtypes; None where it is None for every loss.

    Raises:
        StructureError: There are no losses, trees do not match, or the aggregator returns another
            shape than `[n]`.

    Source:
        Aggregators: Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
        https://arxiv.org/abs/2406.16232
    """
    if not callable(aggregator):
        return weighted_sum(per_loss, aggregator, losses=losses)
    matrix, unravel = to_matrix(per_loss, losses=losses)
    vector = aggregator(matrix)
    if not isinstance(vector, Tensor) or vector.shape != matrix.shape[1:]:
        got = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else repr(type(vector))
        raise StructureError(
            message(
                "the aggregator's result",
                f"a vector of shape {tuple(matrix.shape[1:])}",
                got,
                "reduce the matrix over its rows: matrix.mean(0)",
            )
        )
    return unravel(vector)
