"""The gradients of several losses: as a matrix, their products, and made into one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._compat.autograd import flatten_dense, unflatten_dense
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.call import check_aggregator, is_real_number, is_weighting, number_for_torch
from gradkit._core.leaf_arithmetic import (
    add_leaves,
    from_real_vector,
    products,
    real_vector,
    symmetrized,
    to_common_dtype,
    with_zeros,
)
from gradkit._core.pytree import PyTree, Structure
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.tree._arithmetic import Leaf, are_plainly_alike, flatten_aligned

_Weight: TypeAlias = float | Tensor
_dtype, _device, _layout = map(attrgetter, ("dtype", "device", "layout"))
_requires_grad = attrgetter("requires_grad")
# The most entries of a row in one group.
_LARGEST_GROUP = 1 << 18
# A leaf with more entries is a group by itself: copying it would cost more than one more product.
_LARGEST_GROUPED = 1 << 14


@dataclass(frozen=True, slots=True)
class PerLossRows:
    """The gradients of several losses: `rows[k][i]` is leaf i of row k, or None."""

    rows: list[list[Leaf]]  # a row for each loss, or for each element of one that is no scalar
    counts: list[int]  # the number of rows of each loss
    losses: Structure
    unflatten: Callable[[Sequence[Leaf]], PyTree]  # from the leaves of a row to a tree of gradients

    def examples(self) -> dict[int, Tensor]:
        """Return the gradient of some row at each leaf for which not every row has None."""
        present = ([x for x in column if x is not None] for column in zip(*self.rows, strict=True))
        return {leaf: column[0] for leaf, column in enumerate(present) if column}

    def groups(self) -> list[list[int]] | None:
        """Return the leaves' indices, small ones together; None unless all are dense and alike."""
        if torch.compiler.is_compiling() or transforms():
            return None
        leaves = list(chain.from_iterable(self.rows))
        if set(map(type, leaves)) != {Tensor}:
            return None
        kinds = [set(map(read, leaves)) for read in (_dtype, _device, _layout)]
        if any(len(kind) > 1 for kind in kinds) or kinds[2] != {torch.strided}:
            return None
        if not kinds[0] <= {torch.float32, torch.float64}:
            return None
        groups: list[list[int]] = []
        group: list[int] = []
        size = 0
        for index, leaf in enumerate(cast("list[Tensor]", self.rows[0])):
            if leaf.numel() > _LARGEST_GROUPED:
                groups.append([index])
                continue
            group.append(index)
            size += leaf.numel()
            if size > _LARGEST_GROUP:
                groups.append(group)
                group, size = [], 0
        return [*groups, group] if group else groups

    def of_group(self, group: list[int]) -> Sequence[Tensor] | Tensor:
        """Return the leaf of each row, or of a group of several a matrix with their entries."""
        if len(group) == 1:
            return [cast("Tensor", row[group[0]]) for row in self.rows]
        own = self.rows if len(group) == len(self.rows[0]) else map(itemgetter(*group), self.rows)
        every = cast("list[Tensor]", list(chain.from_iterable(own)))
        return flatten_dense(every).view(len(self.rows), -1)


def read_per_loss_rows(per_loss: PyTree, losses: PyTree | None) -> PerLossRows:
    """Flatten a tree of losses of trees of gradients, as `per_loss_grads` returns it."""
    if isinstance(per_loss, Iterator):
        per_loss = tuple(per_loss)
    shapes: list[tuple[int, ...]]
    if losses is None:
        level = pytree.top_level(per_loss)
        shapes = [()] * level.num_leaves
    else:
        leaves, level = pytree.flatten(losses)
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]
    trees = pytree.flatten_up_to(level, "losses", per_loss, "per_loss")
    if not trees or (losses is None and level.is_leaf()):
        expected = "the gradients of at least one loss, with the losses as its top level"
        fix = "pass what per_loss_grads returned; for a lone loss, also losses=, the loss itself"
        raise StructureError(message("per_loss", expected, "none", fix))
    if losses is None and isinstance(per_loss, dict):
        _refuse_gradient_of_module(dict(zip(per_loss, trees, strict=False)))

    def path(loss: int) -> str:
        return pytree.path(level, loss, "per_loss")

    def leaf_path(leaf: int, loss: int) -> str:
        return pytree.path(spec, leaf, path(loss))

    try:
        by_loss, spec = flatten_aligned(trees, path)
    except StructureError as error:
        raise StructureError(f"{error}; or {_OF_EACH_LOSS}") from None
    if any(shapes) or not are_plainly_alike(by_loss):
        for leaf, column in enumerate(zip(*by_loss, strict=True)):
            _check_column(column, shapes, partial(leaf_path, leaf))
    pairs = zip(by_loss, shapes, strict=True)
    rows = [row for leaves, shape in pairs for row in _split(leaves, shape)]
    if not rows:
        fix = "leave out losses without elements"
        raise StructureError(message("losses", "at least one element", "none", fix))
    return PerLossRows(rows, list(map(prod, shapes)), level, spec.unflatten)


_OF_EACH_LOSS = (
    "pass what gradkit.per_loss_grads(losses, params) returned, whose top level is the losses, and "
    "not the gradient of one call of value_and_grads"
)


def _refuse_gradient_of_module(by_name: dict[Any, Any]) -> None:
    """Raise if these are the parameters of a module, which would be taken for losses."""
    # Other names tell nothing: per_loss_grads(losses, w) of one tensor returns such a dict, too.
    if not all(isinstance(leaf, Tensor | None) for leaf in by_name.values()):
        return
    known = [name for name in by_name if isinstance(name, str) and _is_of_parameter(name)]
    if len(known) == len(by_name) or any("." in name for name in known):
        expected = "the gradients of several losses, with the losses as its top level"
        got = f"the gradient of one sum of losses: {known[0]!r} is the name of a parameter"
        fix = f"{_OF_EACH_LOSS}; if these are the names of losses, also give losses=, the losses"
        raise StructureError(message("per_loss", expected, got, fix))


def _is_of_parameter(name: str) -> bool:
    """Return whether torch's modules have parameters of such names, and losses hardly do."""
    last = name.rpartition(".")[2]
    return (
        last in {"weight", "bias"}
        or last.endswith(("_weight", "_bias"))
        or last.startswith(("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        or "parametrizations." in name
    )


def _check_column(
    column: Sequence[Any], shapes: Sequence[tuple[int, ...]], path: Callable[[int], str]
) -> None:
    """Raise unless one leaf has the same shape in every loss, after the shape of the loss."""
    like: tuple[int, ...] | None = None
    for loss, leaf in enumerate(column):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            fix = _OF_EACH_LOSS
            raise LeafTypeError(message(path(loss), "a tensor or None", describe(leaf), fix))
        if leaf.is_nested and leaf.layout == torch.strided:  # such a tensor has no shape
            expected, got = "a dense or a sparse tensor", "a nested tensor of layout torch.strided"
            fix = "gradkit.tree.map(lambda x: torch.nested.to_padded_tensor(x, 0.0), per_loss)"
            raise LeafTypeError(message(path(loss), expected, got, fix))
        if like is None:
            like = tuple(leaf.shape[len(shapes[loss]) :])
        if leaf.shape != (*shapes[loss], *like):
            expected = f"one shape for all losses, here {(*shapes[loss], *like)}"
            fix = f"{_OF_EACH_LOSS}; or give losses=, the losses, if one of them is not a scalar"
            raise StructureError(message(path(loss), expected, f"{tuple(leaf.shape)}", fix))


def _split(leaves: list[Leaf], shape: tuple[int, ...]) -> list[list[Leaf]]:
    """Return the rows of one loss, one for each of its elements."""
    if not shape:
        return [leaves]
    last = len(shape) - 1
    columns = [
        [None] * prod(shape) if x is None else x.to_dense().flatten(0, last).unbind()
        for x in leaves
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def to_matrix(
    per_loss: PyTree, *, losses: PyTree | None = None
) -> tuple[Tensor, Callable[[Tensor], PyTree]]:
    """Return the matrix with one row per loss, and the function from a vector back to a tree.

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
        losses: A tree with the structure of the losses, if that is deeper than one level; the
            losses themselves, if one of them is not a scalar: each of its elements is a row.

    Returns:
        `(matrix, unravel)`. `matrix`: `[K, n]`, the leaves in order, in their common dtype, float32
        at least; a complex entry is two columns; a leaf that is None for every loss has no column.
        `unravel`: from `[n]` to a tree like the gradients of one loss, in their dtypes; None where
        every loss has None.

    Raises:
        LeafTypeError: A gradient is not a tensor.
        StructureError: There are no losses, their gradients do not match, or `per_loss` is the
            gradient of one call of `value_and_grads`, as the names of its parameters show.

    Source:
        `jax.flatten_util.ravel_pytree`, for each loss.
    """
    rows = read_per_loss_rows(per_loss, losses)
    likes = rows.examples()
    widths = [like.numel() * (2 if like.is_complex() else 1) for like in likes.values()]
    shape = len(rows.rows), sum(widths)

    def unravel(vector: Tensor) -> PyTree:
        leaves: list[Leaf] = [None] * len(rows.rows[0])
        if likes:
            _check_vector("unravel", vector, *shape)
            parts = torch.split(vector, widths)
            for (leaf, like), part in zip(likes.items(), parts, strict=True):
                leaves[leaf] = from_real_vector(part.to(like.device), like).clone()
        return rows.unflatten(leaves)

    if not likes:
        return torch.zeros(len(rows.rows), 0), unravel
    return torch.stack([_as_vector(row, likes) for row in rows.rows]), unravel


def _as_vector(row: Sequence[Leaf], likes: Mapping[int, Tensor]) -> Tensor:
    pairs = [(row[leaf], like) for leaf, like in likes.items()]
    parts = [torch.zeros_like(like, layout=torch.strided) if x is None else x for x, like in pairs]
    return torch.cat(to_common_dtype(list(map(real_vector, parts))))


def _check_vector(name: str, vector: object, count: int, length: int) -> None:
    """Raise unless this is a real vector with an entry for each of the columns of a matrix."""
    fix = "reduce the matrix over its rows: matrix.mean(0)"
    if isinstance(vector, Tensor):
        if vector.shape == (length,) and vector.is_floating_point():
            if vector.layout == torch.strided:
                return
            fix = "return vector.to_dense()"
        elif vector.shape == (count,):
            fix = (
                "one weight for each loss is for gradkit.combine(per_loss, weights), or "
                "gradkit.value_and_grads(losses, params, weights=function)"
            )
    expected = f"a dense real vector of shape ({length},)"
    raise StructureError(message(name, expected, describe(vector), fix))


def gram(per_loss: PyTree, *, losses: PyTree | None = None) -> Tensor:
    """Return the inner products of the losses' gradients, without building their matrix.

    Those of gradients that need not all be in memory: `gradkit.gram`.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.gram([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.0, 3.0])}])
        tensor([[5., 6.],
                [6., 9.]])

    Args:
        per_loss: As in `to_matrix`.
        losses: As in `to_matrix`.

    Returns:
        `[K, K]`, symmetric: `matrix @ matrix.T` for the matrix of `to_matrix`, in its dtype and on
        the device of the first leaf.

    Raises:
        GradkitError: As in `to_matrix`.
    """
    return _gram(read_per_loss_rows(per_loss, losses))


def _gram(rows: PerLossRows) -> Tensor:
    groups = rows.groups()
    if groups is None:
        return symmetrized(_product_of_leaves(rows))
    return symmetrized(reduce(torch.add, (products(rows.of_group(group)) for group in groups)))


def _product_of_leaves(rows: PerLossRows) -> Tensor:
    count = len(rows.rows)
    total: Tensor | None = None
    for column in zip(*rows.rows, strict=True):
        vectors = {row: real_vector(x) for row, x in enumerate(column) if x is not None}
        if vectors:
            part = with_zeros(products(list(vectors.values())), list(vectors), count)
            total = part if total is None else total + part.to(total.device)
    return torch.zeros(count, count) if total is None else total


def combine(
    per_loss: PyTree,
    aggregator: Callable[[Tensor], Tensor] | PyTree,
    *,
    losses: PyTree | None = None,
) -> PyTree:
    """Return one gradient made of the gradients of several losses.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": torch.tensor([3.0, 0.0])}}
        >>> gradkit.combine(per_loss, lambda matrix: matrix.mean(0))
        {'w': tensor([2.0000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        aggregator: A function from the matrix `[K, n]` of `to_matrix` to a vector `[n]`, such as
            an aggregator of TorchJD. Or weights, as in `weighted_sum`, or a weighting of TorchJD
            that takes the inner products `[K, K]`, such as `UPGradWeighting()`: no matrix is built.
        losses: As in `to_matrix`.

    Returns:
        A tree like the gradients of one loss, in their dtypes; None where every loss has None.

    Raises:
        OptionError: `aggregator` is a class, or a weighting of TorchJD that takes something else.
        StructureError: The aggregator returns no dense real vector of shape `[n]`.
        GradkitError: As in `weighted_sum`.

    Source:
        Aggregators: Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
        https://arxiv.org/abs/2406.16232
    """
    if not callable(aggregator):
        return weighted_sum(per_loss, aggregator, losses=losses)
    if is_weighting(aggregator):
        with put_back_on_error(aggregator):
            return _weighted_by_gram(read_per_loss_rows(per_loss, losses), aggregator)
    check_aggregator(aggregator)
    matrix, unravel = to_matrix(per_loss, losses=losses)
    with put_back_on_error(aggregator):
        vector = aggregator(matrix)
        _check_vector("the aggregator's result", vector, *matrix.shape)
    return unravel(vector)


def _weighted_by_gram(rows: PerLossRows, weighting: Callable[[Tensor], Any]) -> PyTree:
    """Return the sum with weights that are a function of the inner products."""
    groups = rows.groups()
    if groups is None or len(groups) > 1 or len(groups[0]) < 2:
        return _weighted_sum(rows, weighting(_gram(rows)))
    matrix = cast("Tensor", rows.of_group(groups[0]))  # few entries: made once for both
    weights = weighting(symmetrized(products(matrix)))
    if not isinstance(weights, Tensor) or weights.shape != (len(matrix),):
        return _weighted_sum(rows, weights)
    likes = cast("list[Tensor]", rows.rows[0])
    return rows.unflatten(_split_like(weights.to(matrix) @ matrix, likes))


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
        per_loss: As in `to_matrix`.
        weights: Numbers or tensors in the structure of the losses, or a prefix of it; or a tensor
            of K weights. None is all ones.
        losses: As in `to_matrix`.

    Returns:
        A tree like the gradients of one loss, in their dtypes; None where every loss has None.

    Raises:
        LeafTypeError: A weight is not a real number.
        StructureError: The weights do not match the losses.
        GradkitError: As in `to_matrix`.
    """
    return _weighted_sum(read_per_loss_rows(per_loss, losses), weights)


def _weighted_sum(rows: PerLossRows, weights: PyTree) -> PyTree:
    by_row = _row_weights(weights, rows)
    tensors = (x for x in chain(by_row, *rows.rows) if isinstance(x, Tensor))
    groups = rows.groups()
    if groups is not None and not any(map(_requires_grad, tensors)):
        return rows.unflatten(_sum_in_groups(rows, groups, by_row))
    total: list[Leaf] = [None] * len(rows.rows[0])
    for row, weight in zip(rows.rows, by_row, strict=True):
        scaled = [None if leaf is None else _times(leaf, weight) for leaf in row]
        total = [add_leaves(a, b) for a, b in zip(total, scaled, strict=True)]
    return rows.unflatten(total)


def _sum_in_groups(
    rows: PerLossRows, groups: list[list[int]], weights: list[_Weight | None]
) -> list[Leaf]:
    """Return the same sums, added in the same order, several leaves at a time."""
    sums: list[Leaf] = [None] * len(rows.rows[0])
    for group in groups:
        scaled = map(_times, rows.of_group(group), weights)  # one at a time
        total = next(scaled)
        if weights[0] is None:
            total = total.clone()
        for vector in scaled:
            total += vector
        if len(group) == 1:
            sums[group[0]] = total
            continue
        likes = [cast("Tensor", rows.rows[0][leaf]) for leaf in group]
        for leaf, part in zip(group, _split_like(total, likes), strict=True):
            sums[leaf] = part
    return sums


def _split_like(vector: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector in memory of their own, in the layouts of some tensors."""
    parts = unflatten_dense(vector, likes)
    if all(map(Tensor.is_contiguous, likes)):
        return list(map(Tensor.clone, parts))
    return [torch.empty_like(like).copy_(x) for like, x in zip(likes, parts, strict=True)]


def _row_weights(weights: PyTree, rows: PerLossRows) -> list[_Weight | None]:
    """Return the weight of each row, checked; None is one."""
    count = len(rows.rows)
    if weights is None:
        return [None] * count
    if isinstance(weights, Tensor) and weights.dim() == 1:
        if len(weights) != count:
            expected = f"{count} weights, one for each loss"
            fix = "weights=torch.ones(...) of that length, or a tree like the losses"
            raise StructureError(message("weights", expected, str(len(weights)), fix))
        return [_weight(weight) for weight in weights]
    losses = pytree.unflatten(rows.losses, [0.0] * len(rows.counts))
    by_loss = pytree.broadcast_prefix(weights, "weights", losses, "losses")
    by_row: list[_Weight | None] = []
    for weight, repeat in zip(by_loss, rows.counts, strict=True):
        of_elements = isinstance(weight, Tensor) and weight.numel() == repeat != 1
        by_row += list(map(_weight, weight.reshape(-1) if of_elements else [weight] * repeat))
    return by_row


def _weight(weight: Any) -> _Weight:
    """Return the weight of one row: a real number, or a 0-dim tensor of one."""
    if not is_real_number(weight):
        expected = "a real number or a real tensor of one element for each loss"
        fix = "one for each loss: a tree like the losses, or a tensor of one dimension"
        raise LeafTypeError(message("weights", expected, describe(weight), fix))
    return weight.reshape(()) if isinstance(weight, Tensor) else number_for_torch(weight)


def _times(leaf: Tensor, weight: _Weight | None) -> Tensor:
    if weight is None:
        return leaf
    by = weight.to(leaf.device) if isinstance(weight, Tensor) else weight
    return (leaf * by).to(leaf.dtype)
