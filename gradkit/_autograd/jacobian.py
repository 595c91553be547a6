"""The gradients of every element of one loss: a pass each, or vmapped in chunks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from gradkit._autograd.observers import any_observers
from gradkit._autograd.runner import PassRunner
from gradkit._core import functions, graph
from gradkit._core.ownership import PLAIN_TYPES, empty_for, zeros_for
from gradkit.errors import FreedGraphError, GradkitWarning

# What the engine's batched mode gets wrong, or cannot do [G1, G6].
_UNBATCHABLE = {
    "AsStridedScatterBackward0": "torch computes a batched as_strided_scatter wrongly",
    "CompiledFunctionBackward": "a backward compiled by torch.compile takes no batch",
}


# A batched pass saves the overhead of an operation, not its work: it pays where the tensors are
# small. On the CPU it takes 0.3 to 0.9 of the time of the loop below this many elements, and up to
# 1.9 above (benchmarks/); for CUDA the bound is where a pass takes about a millisecond.
_SMALL = {"cpu": 1 << 13, "cuda": 1 << 20}
_FEW = 4

_NOTHING_TO_BATCH = (
    "a loss of one element is a batch of one; the losses of a tree are not batched with each "
    "other, which would push zeros through each other's graphs, and 0 * inf is nan"
)


class Rows:
    """Gathers the gradients of a loss, element by element, without a second copy of them all."""

    def __init__(self, loss: Tensor, variables: list[Tensor], create_graph: bool) -> None:
        self._shape = tuple(loss.shape)
        self._total = loss.numel()
        self._variables = variables
        self._listed = create_graph
        # For each variable: its gradients, the same by rows, and where the next row goes.
        self._buffers: list[Tensor | None] = [None] * len(variables)
        self._by_row: list[Tensor | None] = [None] * len(variables)
        self._filled = [0] * len(variables)
        self._lists: list[dict[int, Tensor]] = [{} for _ in variables]

    def put(self, start: int, stop: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the elements from `start` to `stop`, stacked."""
        for index, grad in enumerate(grads):
            if grad is None:
                continue  # a structural zero, or a row that a custom Function left out
            if self._listed or not _is_plain(grad) or not _is_plain(self._variables[index]):
                self._lists[index].update(zip(range(start, stop), grad.unbind(), strict=True))
            else:
                self._rows(index, grad, start)[start:stop].copy_(grad)
                self._filled[index] = stop

    def _rows(self, index: int, grad: Tensor, start: int) -> Tensor:
        rows = self._by_row[index]
        if rows is None:
            variable = self._variables[index]
            buffer = empty_for(variable, grad.dtype, self._shape)
            rows = buffer.view(self._total, *variable.shape)
            self._buffers[index], self._by_row[index] = buffer, rows
        rows[self._filled[index] : start].zero_()  # rows that were left out
        return rows

    def result(self) -> list[Tensor | None]:
        """Return for each variable a tensor of shape `loss.shape + variable.shape`, or None."""
        for rows, filled in zip(self._by_row, self._filled, strict=True):
            if rows is not None:
                rows[filled:].zero_()
        return [
            self._stacked(rows) if rows else buffer
            for rows, buffer in zip(self._lists, self._buffers, strict=True)
        ]

    def _stacked(self, rows: dict[int, Tensor]) -> Tensor:
        like = next(iter(rows.values()))
        stacked = torch.stack([rows.get(i, torch.zeros_like(like)) for i in range(self._total)])
        return stacked.reshape(*self._shape, *like.shape) if len(self._shape) != 1 else stacked


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) in PLAIN_TYPES


def sequential(
    run: PassRunner, loss: Tensor, variables: list[Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss of shape S, each `S + variable.shape`: a pass an element."""
    if loss.dim() == 0:
        return run.grads([loss], [None], variables, retain=retain)
    if loss.numel() == 0:
        return _empty(loss, variables)
    rows = Rows(loss, variables, run.call.create_graph)
    for row in range(loss.numel()):
        _put_one(rows, run, loss, variables, row, retain=retain or row + 1 < loss.numel())
    return rows.result()


def _empty(loss: Tensor, variables: list[Tensor]) -> list[Tensor | None]:
    nodes = graph.nodes_below([loss])
    leaves = graph.leaves_of(nodes)
    return [
        zeros_for(v, tuple(loss.shape)) if graph.reached(v, [loss], nodes, leaves) else None
        for v in variables
    ]


def batched(
    run: PassRunner, loss: Tensor, variables: list[Tensor], *, retain: bool, chunk_size: int | None
) -> list[Tensor | None]:
    """Return what `sequential` does, to rounding, in vmapped passes.

    They keep the graph, so that `sequential` can follow a failure; to free it, the last element
    has a pass of its own.

    Raises:
        FreedGraphError: The graph has been freed before.
    """
    rows = Rows(loss, variables, run.call.create_graph)
    last = loss.numel() if retain else loss.numel() - 1
    try:
        for start in range(0, last, chunk_size or last):
            stop = min(start + (chunk_size or last), last)
            seeds = one_hot(loss, start, stop)
            rows.put(start, stop, run.batched_grads(loss, seeds, variables))
    except FreedGraphError:
        raise
    except RuntimeError as error:
        _warn(f"the batched pass failed ({type(error).__name__}: {error})")
        return sequential(run, loss, variables, retain=retain)
    if not retain:
        _put_one(rows, run, loss, variables, last, retain=False)
    return rows.result()


def choose(strategy: str, losses: list[Tensor], variables: list[Tensor]) -> set[int]:
    """Return the ids of the losses to batch, and warn if there were to be some and are none.

    Args:
        strategy: The caller's option.
        losses: The losses that carry a graph.
        variables: What they are differentiated by.

    Returns:
        Those that are worth it and not known to fail.
    """
    if strategy == "sequential":
        return set()
    if strategy == "auto":
        losses = [loss for loss in losses if _worth_batching(loss)]
    reasons = {id(loss): _why_not(loss, variables) for loss in losses}
    refused = dict.fromkeys(reason for reason in reasons.values() if reason)
    if None in reasons.values():
        refused.pop(_NOTHING_TO_BATCH, None)
    if strategy == "batched" and refused:
        _warn("; ".join(refused))
    return {key for key, reason in reasons.items() if reason is None}


def _warn(reason: str) -> None:
    text = f"per_loss_grads fell back from batched to sequential passes: {reason}."
    warnings.warn(text, GradkitWarning, stacklevel=level_of_the_caller())


def level_of_the_caller() -> int:
    """Return the stack level, seen from the function that warns, of the code that called us."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours_or_torchs(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours_or_torchs(module: str) -> bool:
    return module.partition(".")[0] in {"gradkit", "torch"}


def _worth_batching(loss: Tensor) -> bool:
    if loss.numel() < _FEW or not loss.requires_grad:
        return False
    return graph.largest_tensor(graph.nodes_below([loss])) <= _SMALL.get(loss.device.type, 0)


def _put_one(
    rows: Rows, run: PassRunner, loss: Tensor, variables: list[Tensor], row: int, *, retain: bool
) -> None:
    seed = one_hot(loss, row, row + 1)[0]
    grads = run.grads([loss], [seed], variables, retain=retain)
    rows.put(row, row + 1, [None if grad is None else grad.unsqueeze(0) for grad in grads])


def one_hot(loss: Tensor, start: int, stop: int) -> Tensor:
    """Return the cotangents of the elements of `loss` from `start` to `stop`, stacked."""
    rows = torch.arange(start, stop, device=loss.device)
    columns = torch.arange(loss.numel(), device=loss.device)
    # Compared and not filled: torch.compile does not follow a write to a diagonal.
    return (rows[:, None] == columns).to(loss.dtype).view(stop - start, *loss.shape)


def _why_not(loss: Tensor, variables: list[Tensor]) -> str | None:
    """Return why this loss is known not to come out right in the batched mode, or not to run."""
    if loss.numel() < 2:
        return _NOTHING_TO_BATCH
    if any_observers():
        return "safe_retain keeps gradients, and those of a batch cannot outlive it"
    if loss.retains_grad or any(v.grad_fn is not None for v in variables):
        return "the gradient of a tensor that is no leaf is taken where it arrives, one at a time"
    nodes = graph.nodes_below([loss])
    kinds = set(map(type, nodes))
    for kind in kinds:
        if kind.__name__ in _UNBATCHABLE:
            return _UNBATCHABLE[kind.__name__]
    custom = functions.user_functions(kinds)
    if custom:
        return f"the backward of {custom[0].__name__.removesuffix('Backward')} may not be batchable"
    if any(getattr(node, "_saved_sparse", False) is True for node in nodes):
        return "a sparse gradient cannot be batched"
    return None
