"""The gradients of every element of one loss: a pass for each, or vmapped in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradkit._autograd.observers import any_observers
from gradkit._core import functions
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph, largest_tensor
from gradkit._core.ownership import PLAIN_TYPES, empty_for, zeros_for
from gradkit._core.warn import warn_fallback
from gradkit.errors import GradkitError

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


class Passes(Protocol):
    """Runs engine passes: eager ones, or those inside a level of torch.func."""

    @property
    def create_graph(self) -> bool:
        """Whether the gradients have a graph, so that they are not copied into a buffer."""

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Run one pass from all outputs, with these cotangents."""

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Run one vmapped pass over a batch of cotangents, and keep the graph."""


class JacobianBuffer:
    """Gathers the gradients of a loss, element by element, without a second copy of them all."""

    def __init__(self, loss: Tensor, variables: list[Tensor], *, in_place: bool) -> None:
        self._shape = tuple(loss.shape)
        self._total = loss.numel()
        self._variables = variables
        self._in_place = in_place
        # For each variable: its gradients, a view of them by rows, and where the next row goes.
        self._buffers: list[Tensor | None] = [None] * len(variables)
        self._by_row: list[Tensor | None] = [None] * len(variables)
        self._filled = [0] * len(variables)
        self._parts: list[list[tuple[int, Tensor]]] = [[] for _ in variables]

    def put(self, start: int, stop: int, grads: Sequence[Tensor | None]) -> None:
        """Store the stacked gradients of the elements from `start` to `stop`."""
        for index, grad in enumerate(grads):
            if grad is None:
                continue  # a structural zero, or a row that a custom Function left out
            if self._in_place and _is_plain(grad) and _is_plain(self._variables[index]):
                self._rows(index, grad, start)[start:stop].copy_(grad)
                self._filled[index] = stop
            else:
                self._parts[index].append((start, grad))

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
            self._joined(parts) if parts else buffer
            for parts, buffer in zip(self._parts, self._buffers, strict=True)
        ]

    def _joined(self, parts: list[tuple[int, Tensor]]) -> Tensor:
        first = parts[0][1]
        tensors: list[Tensor] = []
        filled = 0
        for start, part in parts:
            tensors += _zero_rows(first, start - filled)
            tensors.append(part)
            filled = start + part.shape[0]
        joined = torch.cat([*tensors, *_zero_rows(first, self._total - filled)])
        if len(self._shape) == 1:
            return joined
        return joined.reshape(*self._shape, *first.shape[1:])


def _zero_rows(like: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros_like(like.narrow(0, 0, 1))] * count if count else []


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) in PLAIN_TYPES


def sequential(
    passes: Passes, loss: Tensor, variables: list[Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss of shape S, each `S + variable.shape`: a pass an element."""
    if loss.dim() == 0:
        return passes.grads([loss], [None], variables, retain=retain)
    if loss.numel() == 0:
        return _empty(loss, variables)
    buffer = JacobianBuffer(loss, variables, in_place=not passes.create_graph)
    for row in range(loss.numel()):
        keep = retain or row + 1 < loss.numel()
        _put_row(buffer, passes, loss, variables, row, retain=keep)
    return buffer.result()


def _empty(loss: Tensor, variables: list[Tensor]) -> list[Tensor | None]:
    shape = tuple(loss.shape)
    if torch.compiler.is_compiling():  # which has no graph to read
        return [v.new_zeros((*shape, *v.shape)) for v in variables]
    below = Subgraph([loss])
    return [zeros_for(v, shape) if below.reaches(v) else None for v in variables]


def batched(
    passes: Passes,
    loss: Tensor,
    variables: list[Tensor],
    *,
    retain: bool,
    chunk_size: int | None,
) -> list[Tensor | None]:
    """Return what `sequential` does, to rounding, in vmapped passes."""
    buffer = JacobianBuffer(loss, variables, in_place=not passes.create_graph)
    # Vmapped passes keep the graph, so that `sequential` can follow a failure: the last element
    # has its own pass if the graph is to be freed.
    last = loss.numel() if retain else loss.numel() - 1
    try:
        for start in range(0, last, chunk_size or last):
            stop = min(start + (chunk_size or last), last)
            seeds = one_hot(loss, start, stop)
            buffer.put(start, stop, passes.batched_grads(loss, seeds, variables))
    except RuntimeError as error:
        if torch.compiler.is_compiling() or isinstance(error, GradkitError):
            raise
        _warn(f"the batched pass failed ({type(error).__name__}: {error})")
        return sequential(passes, loss, variables, retain=retain)
    if not retain:
        _put_row(buffer, passes, loss, variables, last, retain=False)
    return buffer.result()


def _put_row(
    buffer: JacobianBuffer,
    passes: Passes,
    loss: Tensor,
    variables: list[Tensor],
    row: int,
    *,
    retain: bool,
) -> None:
    seed = one_hot(loss, row, row + 1)[0]
    grads = passes.grads([loss], [seed], variables, retain=retain)
    buffer.put(row, row + 1, [None if grad is None else grad.unsqueeze(0) for grad in grads])


def one_hot(loss: Tensor, start: int, stop: int) -> Tensor:
    """Return the cotangents of the elements of `loss` from `start` to `stop`, stacked."""
    rows = torch.arange(start, stop, device=loss.device)
    columns = torch.arange(loss.numel(), device=loss.device)
    # Compared and not filled: torch.compile does not follow a write to a diagonal.
    return (rows[:, None] == columns).to(loss.dtype).view(stop - start, *loss.shape)


def choose(strategy: str, call: Call) -> set[int]:
    """Return the indices of the losses to batch, and warn if some were to be and cannot."""
    if strategy == "sequential":
        return set()
    indices = call.differentiated
    losses = [call.outputs[index] for index in indices]
    by_id = dict(zip(map(id, losses), indices, strict=True))

    def below(loss: Tensor) -> Subgraph:
        return call.graph.below([by_id[id(loss)]])

    def why_not(loss: Tensor) -> str | None:
        return _why_not(loss, below(loss), call.passes[0].params.variables)

    batch = losses_to_batch(strategy, losses, why_not, below)
    return {index for index, is_batched in zip(indices, batch, strict=True) if is_batched}


def losses_to_batch(
    strategy: str,
    losses: list[Tensor],
    why_not: Callable[[Tensor], str | None],
    below: Callable[[Tensor], Subgraph] = lambda loss: Subgraph([loss]),
) -> list[bool]:
    """Return which losses to batch; `why_not` gives the reason against one, if there is any."""
    if strategy == "sequential":
        return [False] * len(losses)
    if strategy == "auto":
        return [_worth_batching(loss, below) and why_not(loss) is None for loss in losses]
    reasons = [_NOTHING_TO_BATCH if loss.numel() < 2 else why_not(loss) for loss in losses]
    refused = dict.fromkeys(reason for reason in reasons if reason)
    if None in reasons:
        refused.pop(_NOTHING_TO_BATCH, None)
    if refused:
        _warn("; ".join(refused))
    return [reason is None for reason in reasons]


def _warn(reason: str) -> None:
    if not torch.compiler.is_compiling():
        warn_fallback(f"per_loss_grads fell back from batched to sequential passes: {reason}.")


def _worth_batching(loss: Tensor, below: Callable[[Tensor], Subgraph]) -> bool:
    if loss.numel() < _FEW or not loss.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    return largest_tensor(below(loss).nodes) <= _SMALL.get(loss.device.type, 0)


def _why_not(loss: Tensor, below: Subgraph, variables: list[Tensor]) -> str | None:
    """Return why this loss is known not to come out right in the batched mode, or not to run."""
    if any_observers():
        return "safe_retain keeps gradients, and those of a batch cannot outlive it"
    if loss.retains_grad or any(v.grad_fn is not None for v in variables):
        return "the gradient of a tensor that is no leaf is taken where it arrives, one at a time"
    for kind in below.kinds:
        if kind.__name__ in _UNBATCHABLE:
            return _UNBATCHABLE[kind.__name__]
    custom = functions.user_functions(below.kinds)
    if custom:
        return f"the backward of {custom[0].__name__.removesuffix('Backward')} may not be batchable"
    if any(getattr(node, "_saved_sparse", False) is True for node in below.nodes):
        return "a sparse gradient cannot be batched"
    return None
