"""Norms of the gradients of the elements of losses, without the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit._autograd.ghost_norms import ghost_norms
from gradkit._autograd.loss_rows import LossRows, read_rows
from gradkit._autograd.passes import finish, run_in_turn
from gradkit._autograd.reductions import ReducingRunner
from gradkit._autograd.runner import PassRunner
from gradkit._compat.distributed import full_tensor
from gradkit._core.call import Call, Grads, Pass
from gradkit._core.leaf_arithmetic import norms_of_rows, stored
from gradkit._core.losses import Losses
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree


def clipped_sum(
    losses: Losses,
    params: Params,
    max_norm: float | Tensor,
    *,
    chunk_size: int | None,
    retain: bool,
) -> PyTree:
    """Return the sum of the gradients of the elements of one loss, each of at most some norm."""
    by_element = norms(losses, params, chunk_size=chunk_size, retain=True)
    (loss,) = losses.leaves
    factors = (max_norm / (by_element + 1e-6)).clamp(max=1.0)  # those of clip_grad_norm_
    call = Call(losses, [loss], [Pass([0], params)])
    seeds = [factors.detach().to(loss).view_as(loss)]
    grads = PassRunner(call).grads([loss], seeds, params.variables, retain=retain)
    return finish(grads, params, "none", create_graph=False)


def norms(losses: Losses, params: Params, *, chunk_size: int | None, retain: bool) -> Tensor:
    """Return the norm of the gradient of each element of each loss."""
    matrix = read_rows(losses, params)
    by_loss = [matrix.zeros(loss.numel()) for loss in losses.leaves]
    begin = [sum(loss.numel() for loss in losses.leaves[:i]) for i in range(len(by_loss))]

    def measure(index: int, variables: list[Tensor], keep: bool) -> Grads:
        rows = range(begin[index], begin[index] + len(by_loss[index]))
        result: Tensor | None = None
        if len(rows) > 1:
            result = ghost_norms(matrix, index)
        if result is None and len(rows) > 1 and chunk_size != 1:
            result = matrix.batched(lambda: _batched(matrix, rows, chunk_size), [index])
        if result is None:
            one_by_one = [_norm_of_row(matrix, row, keep or row != rows[-1]) for row in rows]
            result = torch.stack(one_by_one) if one_by_one else matrix.zeros(0)
        elif not keep:
            matrix.release([index])
        by_loss[index] = result
        return []

    run_in_turn(matrix.call, measure, retain)
    if matrix.rows:
        matrix.require_reached()
    return torch.cat(by_loss)


def _norm_of_row(matrix: LossRows, row: int, retain: bool) -> Tensor:
    by_leaf: dict[int, Tensor] = {}

    def consume(index: int, grad: Tensor) -> None:
        by_leaf[index] = norms_of_rows(stored(full_tensor(grad)).unsqueeze(0))

    matrix.run_one(ReducingRunner(matrix.call, consume=consume), row, retain=retain)
    return _norm(matrix, by_leaf, 1)[0]


def _batched(matrix: LossRows, rows: range, chunk_size: int | None) -> Tensor:
    """Return the norms of rows of one loss, from vmapped passes."""
    size = chunk_size or len(rows)
    parts: list[Tensor] = []
    for start in range(rows.start, rows.stop, size):
        stop = min(start + size, rows.stop)
        by_leaf: dict[int, Tensor] = {}

        def consume(index: int, stack: Tensor, by_leaf: dict[int, Tensor] = by_leaf) -> None:
            by_leaf[index] = norms_of_rows(stack)

        matrix.run_batch([slice(start, stop)], consume)
        parts.append(_norm(matrix, by_leaf, stop - start))
    return torch.cat(parts)


def _norm(matrix: LossRows, by_leaf: dict[int, Tensor], count: int) -> Tensor:
    """Return the norms of all leaves together, in the order of the variables."""
    zeros = matrix.zeros(count)
    leaves = [by_leaf[index].to(zeros) for index in sorted(by_leaf)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(leaves), dim=0) if leaves else zeros
    return norm
