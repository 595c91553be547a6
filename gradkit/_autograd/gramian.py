"""Inner products of the gradients of losses, which are not in memory together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradkit._autograd.consume_on_arrival import ConsumingRunner
from gradkit._autograd.jacobian_rows import JacobianRows, read_jacobian_rows
from gradkit._autograd.own_roots import unrecorded
from gradkit._autograd.pass_runner import PassRunner
from gradkit._core import pytree
from gradkit._core.call import Grads, Losses, check_weighting
from gradkit._core.leaf_arithmetic import dot_leaves, products_of_rows
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import LeafTypeError, StructureError, describe, message


def gramian(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    """Return the dot_leaves products of the gradients of all elements of all losses."""
    with unrecorded():
        return _gramian(losses, params, chunk_size=chunk_size, retain=retain)


def _gramian(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    rows = read_jacobian_rows(losses, params)
    if not rows.elements:
        fix = "leave out losses without elements"
        raise StructureError(message("losses", "at least one element", "none", fix))
    product: Tensor | None = None
    if len(rows.elements) > 1 and chunk_size != 1:
        run = partial(_products, rows)
        losses_of_rows = rows.call.differentiated
        product = rows.batched(lambda: by_blocks(rows, chunk_size, run), losses_of_rows)
    if product is None:
        product = _sequential(rows, chunk_size or 1)
    rows.require_reached()
    if not retain:
        rows.release(rows.call.differentiated)
    return symmetrized(product)


def symmetrized(product: Tensor) -> Tensor:
    """Return the upper triangle in both halves: a product of matrices may round asymmetrically."""
    return product.triu() + product.triu(1).T


def by_blocks(
    rows: JacobianRows, chunk_size: int | None, run: Callable[[Sequence[slice]], Tensor]
) -> Tensor:
    """Return the products of all rows; `run` gives those of two blocks of rows, from one pass."""
    count = len(rows.elements)
    size = count if chunk_size is None or chunk_size >= count else chunk_size // 2
    blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    pairs = [[a, b] for index, a in enumerate(blocks) for b in blocks[index + 1 :]]
    total = rows.zeros(count, count)
    for parts in pairs or [blocks]:
        sizes = [part.stop - part.start for part in parts]
        product = run(parts)
        for part, lines in zip(parts, torch.split(product, sizes), strict=True):
            for other, block in zip(parts, torch.split(lines, sizes, 1), strict=True):
                total[part, other] = block
    return total


def _products(rows: JacobianRows, parts: Sequence[slice]) -> Tensor:
    """Return the products of some rows, from one vmapped pass."""
    products: dict[int, Tensor] = {}

    def consume(index: int, stack: Tensor) -> None:
        products[index] = products_of_rows(stack)

    rows.run_batch(parts, consume)
    size = sum(part.stop - part.start for part in parts)
    return _sum(products, rows.zeros(size, size))


def _sum(by_leaf: dict[int, Tensor], total: Tensor) -> Tensor:
    """Add what the variables gave, in their order and not in that of arrival."""
    for index in sorted(by_leaf):
        product = by_leaf[index]
        if hasattr(type(product), "__tensor_flatten__"):
            # Its data are several tensors, and torch would add each of them.
            expected = "gradients whose inner products are plain tensors"
            got = f"a {type(product).__name__}, which is made of several tensors"
            fix = "gradkit.tree.gram(gradkit.per_loss_grads(losses, params))"
            raise LeafTypeError(message("params", expected, got, fix))
        total += product.to(total)
    return total


def _sequential(rows: JacobianRows, held_at_a_time: int) -> Tensor:
    """Return the products of all rows: of some that are held, with each that comes after them."""
    total = rows.zeros(len(rows.elements), len(rows.elements))
    every = rows.differentiable
    for start in range(0, len(every), held_at_a_time):
        group = every[start : start + held_at_a_time]
        held = [rows.run_one(PassRunner(rows.call), row) for row in group]
        for at, column in enumerate(every[start:]):
            products: list[dict[int, Tensor]] = [{} for _ in held]
            _consume_row(rows, held, at, column, products)
            for row, by_leaf in zip(group, products, strict=True):
                _sum(by_leaf, total[row, column])
    return total


def _consume_row(
    rows: JacobianRows, held: list[Grads], at: int, row: int, products: list[dict[int, Tensor]]
) -> None:
    """Multiply the gradients of a row, leaf by leaf, with those that are held."""

    def consume(index: int, grad: Tensor) -> None:
        for grads, by_leaf in zip(held, products, strict=True):
            product = dot_leaves(grads[index], grad)
            if product is not None:
                by_leaf[index] = product

    if at >= len(held):
        rows.run_one(ConsumingRunner(rows.call, consume=consume), row)
        return
    for index, grad in enumerate(held[at]):
        if grad is not None:
            consume(index, grad)


def weights_from_gramian(
    losses: Losses, params: Params, weighting: Callable[[Tensor], Sequence[Any] | Tensor]
) -> PyTree:
    """Return the weights that a function gives to losses by the products of their gradients."""
    check_weighting(weighting)
    product = gramian(losses, params, chunk_size=None, retain=True)
    return pytree.unflatten(losses.spec, weights_of(product, weighting))


def weights_of(product: Tensor, weighting: Callable[[Tensor], Sequence[Any] | Tensor]) -> list[Any]:
    """Return the weight that a function gives to each loss by the products of their gradients."""
    with put_back_on_error(weighting):
        weights = weighting(product)
    count = len(product)
    fits = weights.dim() == 1 if isinstance(weights, Tensor) else isinstance(weights, Sequence)
    if not fits or len(weights) != count:
        expected = f"{count} weights, one for each loss: a tensor of shape ({count},) or a list"
        got = f"{len(weights)}" if fits else describe(weights)
        fix = "weights=lambda gramian: torch.ones(len(gramian))"
        raise StructureError(message("the result of weights(gramian)", expected, got, fix))
    return list(weights)
