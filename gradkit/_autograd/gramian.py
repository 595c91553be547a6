"""Inner products and norms of the gradients of losses, which are not in memory together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradkit._autograd.consume_on_arrival import Consume, ConsumingRunner
from gradkit._autograd.engine import unrecorded
from gradkit._autograd.ghost_norms import ghost_norms
from gradkit._autograd.jacobian_rows import JacobianRows, read_jacobian_rows
from gradkit._autograd.passes import PassRunner, grads_to_tree, run_in_turn
from gradkit._checks.circumstances import HOOKS
from gradkit._compat.autograd import record_stream
from gradkit._compat.distributed import full_tensor
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import Grads, Losses, check_weighting
from gradkit._core.grad_recorder import any_observers, numbered_passes, scale_recorded
from gradkit._core.leaf_arithmetic import (
    add_leaves,
    clip_factor,
    dot_leaves,
    norms_of_rows,
    products_of_rows,
    stored_values,
    symmetrized,
)
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit._state.hook_tables import hooks_kept, hooks_put_back, same_hooks_in_each_pass
from gradkit._state.snapshot import put_back_on_error
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message


def clipped_sum(
    losses: Losses, params: Params, max_norm: float | Tensor, chunk_size: int | None, retain: bool
) -> PyTree:
    """Return the sum of the gradients of the elements of one loss, each of at most some norm."""
    rows = read_jacobian_rows(losses, params)
    if (rows.call.around or 0) & HOOKS and not hooks_kept():
        with same_hooks_in_each_pass():
            return clipped_sum(losses, params, max_norm, chunk_size, retain)
    if isinstance(max_norm, Tensor) and max_norm.is_meta and not params.variables[0].is_meta:
        expected = "a number, or a tensor that has a value"
        raise OptionError(message("max_norm", expected, describe(max_norm), "max_norm=1.0"))
    (loss,) = losses.leaves
    if any_observers():
        _ = rows.call.graph  # walked as far as the second pass, which is recorded, goes
    indices = range(loss.numel())
    by_element: Tensor | None = None
    # The cotangents of the second pass are factors, for which float16 has no room.
    if loss.dtype != torch.float16:
        with unrecorded():
            by_element = _of_all_rows(rows, 0, indices, chunk_size)
    if by_element is None and indices:
        grads = _clipped_one_by_one(rows, max_norm, retain=retain)
    else:
        norms = rows.zeros(0) if by_element is None else by_element
        seeds = [_factors(norms, max_norm).to(loss)]
        grads = PassRunner(rows.call).grads([loss], seeds, params.variables, retain=retain)
        rows.note(grads)
    rows.require_reached()
    return grads_to_tree(grads, params, "none", create_graph=False)


def _clipped_one_by_one(rows: JacobianRows, max_norm: float | Tensor, *, retain: bool) -> Grads:
    """Return the sum from a pass for each element: a hook, or a Function, need not be linear."""
    total: Grads = [None] * len(rows.params.variables)
    runner = PassRunner(rows.call)
    for row in range(len(rows.elements)):
        is_last = row + 1 == len(rows.elements)
        with numbered_passes() as passes:
            grads = rows.run_one(runner, row, retain=retain or not is_last)
        norms = {i: _norm_of(grad) for i, grad in enumerate(grads) if grad is not None}
        factor = _factors(_norm(rows, norms, 1)[0], max_norm)
        scale_recorded(passes, factor)  # as a pass for all samples would have recorded it
        for index, grad in enumerate(grads):
            if grad is not None:
                total[index] = add_leaves(total[index], grad.mul_(factor.to(grad.device)))
    return total


def _factors(norms: Tensor, max_norm: float | Tensor) -> Tensor:
    # Infinity times a factor of zero is nan; times a cotangent of zero it could be left out.
    return clip_factor(norms, max_norm).detach().masked_fill(norms.isinf(), torch.nan)


@unrecorded()
def norms(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    """Return the norm of the gradient of each element of each loss."""
    rows = read_jacobian_rows(losses, params)
    by_loss = [rows.zeros(loss.numel()) for loss in losses.leaves]
    begin = [sum(loss.numel() for loss in losses.leaves[:i]) for i in range(len(by_loss))]

    def measure(index: int, variables: list[Tensor], keep: bool) -> Grads:
        indices = range(begin[index], begin[index] + len(by_loss[index]))
        result = _of_all_rows(rows, index, indices, chunk_size)
        if result is None:
            one_by_one = [_norm_of_row(rows, row, keep or row != indices[-1]) for row in indices]
            result = torch.stack(one_by_one) if one_by_one else rows.zeros(0)
        elif not keep:
            rows.release([index])
        by_loss[index] = result
        return []

    run_in_turn(rows.call, measure, retain)
    if rows.elements:
        rows.require_reached()
    return torch.cat(by_loss)


def _of_all_rows(
    rows: JacobianRows, index: int, indices: range, chunk_size: int | None
) -> Tensor | None:
    """Return the norms of a loss from passes for many rows; None if each takes one of its own."""
    if len(indices) < 2:
        return None
    result = ghost_norms(rows, index)
    if result is None and chunk_size != 1:
        result = rows.batched(lambda: _batched(rows, indices, chunk_size), [index])
    return result


def _norm_of_row(rows: JacobianRows, row: int, retain: bool) -> Tensor:
    by_leaf: dict[int, Tensor] = {}
    rows.run_one(ConsumingRunner(rows.call, consume=_into(by_leaf, _norm_of)), row, retain=retain)
    return _norm(rows, by_leaf, 1)[0]


def _into(by_leaf: dict[int, Tensor], fn: Callable[[Tensor], Tensor]) -> Consume:
    """Return what puts a function of the gradients of each leaf into a dictionary."""
    return lambda index, grad: by_leaf.update({index: fn(grad)})


def _norm_of(grad: Tensor) -> Tensor:
    return norms_of_rows(stored_values(full_tensor(grad)).unsqueeze(0))


def _batched(rows: JacobianRows, indices: range, chunk_size: int | None) -> Tensor:
    """Return the norms of rows of one loss, from vmapped passes."""
    size = chunk_size or len(indices)
    parts: list[Tensor] = []
    for start in range(indices.start, indices.stop, size):
        stop = min(start + size, indices.stop)
        by_leaf: dict[int, Tensor] = {}
        rows.run_batch([slice(start, stop)], _into(by_leaf, norms_of_rows))
        parts.append(_norm(rows, by_leaf, stop - start))
    return torch.cat(parts)


def _norm(rows: JacobianRows, by_leaf: dict[int, Tensor], count: int) -> Tensor:
    """Return the norms of all leaves together, in the order of the variables."""
    zeros = rows.zeros(count)
    if not zeros.is_cpu:
        record_stream(by_leaf.values())
    leaves = [by_leaf[index].to(zeros) for index in sorted(by_leaf)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(leaves), dim=0) if leaves else zeros
    return norm


@unrecorded()
def gramian(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    """Return the inner products of the gradients of all elements of all losses."""
    rows = read_jacobian_rows(losses, params)
    if (rows.call.around or 0) & HOOKS and not hooks_kept():
        with same_hooks_in_each_pass():
            return gramian(losses, params, chunk_size=chunk_size, retain=retain)
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
    rows.run_batch(parts, _into(products, products_of_rows))
    size = sum(part.stop - part.start for part in parts)
    return _add_products(products, rows.zeros(size, size))


def _add_products(by_leaf: dict[int, Tensor], total: Tensor) -> Tensor:
    """Add what the variables gave, in their order and not in that of arrival."""
    if not total.is_cpu:
        record_stream(by_leaf.values())
    for index in sorted(by_leaf):
        product = by_leaf[index]
        if hasattr(type(product), "__tensor_flatten__"):
            # The data of such a product are several tensors, and torch would add each of them.
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
                _add_products(by_leaf, total[row, column])
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
    with hooks_put_back(), INSIDE:
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
