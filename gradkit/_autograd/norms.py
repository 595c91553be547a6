"""Norms of the gradients of the elements of losses, without the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit._autograd.consume_on_arrival import ConsumingRunner
from gradkit._autograd.ghost_norms import ghost_norms
from gradkit._autograd.jacobian_rows import JacobianRows, read_jacobian_rows
from gradkit._autograd.own_roots import unrecorded
from gradkit._autograd.pass_runner import PassRunner
from gradkit._autograd.passes import grads_to_tree, run_in_turn
from gradkit._compat.distributed import full_tensor
from gradkit._core.call import Grads, Losses, number_for_torch
from gradkit._core.grad_recorder import any_observers, numbered_passes, scale_recorded
from gradkit._core.leaf_arithmetic import add_leaves, norms_of_rows, stored_values
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, describe, message


def clipped_sum(
    losses: Losses,
    params: Params,
    max_norm: float | Tensor,
    *,
    chunk_size: int | None,
    retain: bool,
) -> PyTree:
    """Return the sum of the gradients of the elements of one loss, each of at most some norm."""
    rows = read_jacobian_rows(losses, params)
    max_norm = _max_norm(max_norm, params)
    (loss,) = losses.leaves
    if any_observers():
        _ = rows.call.graph  # as far as the second pass goes, which is recorded
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


def _max_norm(max_norm: float | Tensor, params: Params) -> float | Tensor:
    """Return the largest norm as torch takes it; raise if it has no value."""
    if isinstance(max_norm, Tensor) and max_norm.is_meta and not params.variables[0].is_meta:
        expected = "a number, or a tensor that has a value"
        raise OptionError(message("max_norm", expected, describe(max_norm), "max_norm=1.0"))
    return number_for_torch(max_norm)


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
    """Return what gradients are multiplied with: the factor of clip_grad_norm_."""
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0).detach()
    # Infinity times a factor of zero is nan; times a cotangent of zero it could be left out.
    return factors.masked_fill(norms.isinf(), torch.nan)


def norms(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    """Return the norm of the gradient of each element of each loss."""
    with unrecorded():
        return _norms(losses, params, chunk_size=chunk_size, retain=retain)


def _norms(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
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

    def consume(index: int, grad: Tensor) -> None:
        by_leaf[index] = _norm_of(grad)

    rows.run_one(ConsumingRunner(rows.call, consume=consume), row, retain=retain)
    return _norm(rows, by_leaf, 1)[0]


def _norm_of(grad: Tensor) -> Tensor:
    return norms_of_rows(stored_values(full_tensor(grad)).unsqueeze(0))


def _batched(rows: JacobianRows, indices: range, chunk_size: int | None) -> Tensor:
    """Return the norms of rows of one loss, from vmapped passes."""
    size = chunk_size or len(indices)
    parts: list[Tensor] = []
    for start in range(indices.start, indices.stop, size):
        stop = min(start + size, indices.stop)
        by_leaf: dict[int, Tensor] = {}

        def consume(index: int, stack: Tensor, by_leaf: dict[int, Tensor] = by_leaf) -> None:
            by_leaf[index] = norms_of_rows(stack)

        rows.run_batch([slice(start, stop)], consume)
        parts.append(_norm(rows, by_leaf, stop - start))
    return torch.cat(parts)


def _norm(rows: JacobianRows, by_leaf: dict[int, Tensor], count: int) -> Tensor:
    """Return the norms of all leaves together, in the order of the variables."""
    zeros = rows.zeros(count)
    leaves = [by_leaf[index].to(zeros) for index in sorted(by_leaf)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(leaves), dim=0) if leaves else zeros
    return norm
