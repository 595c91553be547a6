"""The gradients of every element of one loss: a pass for each, or vmapped in chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradkit._checks.checked import is_checked
from gradkit._checks.modified_tensors import refuse_pre_hooks
from gradkit._compat.distributed import cotangent_for
from gradkit._compat.dynamo import COMPILED
from gradkit._compat.nodes import any_sparse_gradients, sizes_of_gradients
from gradkit._compat.transforms import BATCH_FAILURES
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.grad_recorder import any_observers
from gradkit._core.graph import Subgraph
from gradkit._core.leaf_arithmetic import uncompressed
from gradkit._core.ownership import PLAIN_TYPES, empty_for, zeros_for
from gradkit._core.params import Params
from gradkit._state.hook_tables import put_hooks_back
from gradkit._torch_bugs.node_formulas import holds_formulas
from gradkit.errors import GradkitError, UnsupportedGraphError, first_line, message, warn_fallback

# The nodes that the engine's batched mode gets wrong, or cannot run [G1, G6].
_UNBATCHABLE = {
    "AsStridedScatterBackward0": "torch computes a batched as_strided_scatter wrongly",
    COMPILED: "a backward compiled by torch.compile takes no batch",
}

# A batched pass saves the overhead of an operation, not its work: it pays where there are several
# elements, and tensors that are small. On the CPU these bounds, on the elements of all gradients
# that a pass makes, and on those of the largest, take 1.001 of the better strategy in the mean, and
# 1.07 at most: `python -m benchmarks.choosing` derives them. On CUDA nothing was measured: there,
# the bound is where a pass should take about a millisecond.
FEW = 4
_MOST_IN_ALL = 1 << 22
_LARGEST = {"cpu": 1 << 17, "cuda": 1 << 20}

_NO_LEAF = "the gradient of a tensor that is no leaf is taken where it arrives, one at a time"
_NOTHING_TO_BATCH = (
    "a loss of one element is a batch of one; the losses of a tree are not batched with each "
    "other, which would push zeros through each other's graphs, and 0 * inf is nan"
)


def choose(strategy: str, call: Call) -> set[int]:
    """Return the indices of the losses to batch, and warn if some were to be and cannot."""
    refuse_pre_hooks(call)
    indices = call.differentiated
    losses = [call.outputs[index] for index in indices]
    by_id = dict(zip(map(id, losses), indices, strict=True))

    def below(loss: Tensor) -> Subgraph:
        return call.graph.below([by_id[id(loss)]])

    def why_not(loss: Tensor) -> str | None:
        variables = call.passes[0].params.variables
        if loss.retains_grad or any(v.grad_fn is not None for v in variables):
            return _NO_LEAF
        if call.create_graph and holds_formulas(below(loss)):
            return "the formula that torch has no derivative for is differentiated pass by pass"
        return why_not_batched(below(loss))

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
    few = {0: "", 1: _NOTHING_TO_BATCH}  # an empty loss needs no word
    reasons = [few[loss.numel()] if loss.numel() in few else why_not(loss) for loss in losses]
    refused = dict.fromkeys(reason for reason in reasons if reason)
    if None in reasons:
        refused.pop(_NOTHING_TO_BATCH, None)
    if refused:
        warn_not_batched("; ".join(refused))
    return [reason is None for reason in reasons]


def warn_not_batched(reason: str) -> None:
    """Warn that the passes of a loss run one by one, where batched ones were asked for."""
    if not torch.compiler.is_compiling():
        warn_fallback(f"per_loss_grads fell back from batched to sequential passes: {reason}.")


def _worth_batching(loss: Tensor, below: Callable[[Tensor], Subgraph]) -> bool:
    if loss.numel() < FEW or not loss.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    device = loss.device.type
    if device not in _LARGEST:
        return False
    sizes = sizes_of_gradients(below(loss).nodes)
    is_small = max(sizes, default=0) <= _LARGEST[device]
    return is_small and (device != "cpu" or sum(sizes) <= _MOST_IN_ALL)


def why_not_batched(below: Subgraph, allowed: Collection[str] = ()) -> str | None:
    """Return why a graph is known not to come out right in the batched mode, or not to run."""
    if is_checked():
        return "gradkit.checked() looks at one pass at a time"
    if any_observers():
        return "safe_retain keeps gradients, and those of a batch cannot outlive it"
    for kind in below.kinds:
        if kind.__name__ in _UNBATCHABLE:
            return _UNBATCHABLE[kind.__name__]
    # The Functions that are allowed are known to take batches.
    kinds = [kind for kind in below.kinds if kind.__name__ not in allowed]
    custom = user_code.user_functions(kinds)
    if custom:
        return f"the backward of {custom[0].__name__.removesuffix('Backward')} may not be batchable"
    if any_sparse_gradients(below.nodes):
        return "a sparse gradient cannot be batched"
    return None


class JacobianPasses(Protocol):
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
    """The gradients of a loss, element by element, without a second copy of them all."""

    def __init__(self, loss: Tensor, variables: list[Tensor]) -> None:
        self._loss, self._variables = loss, variables
        # Each variable has a result, a view of it by elements, and where the next one goes; or the
        # parts to join, if its gradients cannot be copied into a buffer.
        self._buffers: list[Tensor | None] = [None] * len(variables)
        self._by_element: list[Tensor | None] = [None] * len(variables)
        self._filled = [0] * len(variables)
        self._parts: list[list[tuple[int, Tensor]]] = [[] for _ in variables]
        self._are_plain = list(map(_is_plain, variables))
        self._columns = torch.arange(loss.numel(), device=loss.device)

    def run_one(self, passes: JacobianPasses, element: int, *, retain: bool) -> None:
        """Run the pass of one element."""
        seed = (self._columns == element).to(self._loss.dtype).view(self._loss.shape)
        seed = seed if type(self._loss) in PLAIN_TYPES else cotangent_for(self._loss, seed)
        grads = passes.grads([self._loss], [seed], self._variables, retain=retain)
        rows = [None if grad is None else uncompressed(grad).unsqueeze(0) for grad in grads]
        self._add(rows, element, in_place=not passes.create_graph)

    def run_batch(self, passes: JacobianPasses, start: int, stop: int) -> None:
        """Run the vmapped pass of the elements from `start` to `stop`, and keep the graph."""
        grads = passes.batched_grads(self._loss, one_hot(self._loss, start, stop), self._variables)
        self._add(grads, start, in_place=not passes.create_graph)

    def _add(self, rows: list[Tensor | None], start: int, *, in_place: bool) -> None:
        for index, some in enumerate(rows):
            if some is None:
                continue  # a structural zero, or an element that a custom Function left out
            if in_place and self._are_plain[index] and _is_plain(some):
                stop = start + len(some)
                self._next(index, start, some.dtype)[start:stop].copy_(some)
                self._filled[index] = stop
            else:
                self._parts[index].append((start, some))

    def _next(self, index: int, start: int, dtype: torch.dtype) -> Tensor:
        """Return the elements of a variable, those before the one at `start` filled."""
        elements = self._by_element[index]
        if elements is None:
            variable = self._variables[index]
            buffer = empty_for(variable, dtype, tuple(self._loss.shape))
            elements = buffer.view(self._loss.numel(), *variable.shape)
            self._buffers[index], self._by_element[index] = buffer, elements
        if self._filled[index] < start:  # there are some that no gradient has come for
            elements[self._filled[index] : start].zero_()
        return elements

    def result(self) -> list[Tensor | None]:
        """Return for each variable a tensor of shape `loss.shape + variable.shape`, or None."""
        columns = zip(self._parts, self._by_element, self._filled, strict=True)
        for parts, elements, filled in columns:
            if elements is not None:
                elements[filled:].zero_()
                # The parts are sparse gradients: with dense ones beside them the sum is dense.
                for start, part in parts:
                    elements.narrow(0, start, len(part)).copy_(part.to_dense())
        return [
            self._joined(parts) if buffer is None and parts else buffer
            for parts, buffer in zip(self._parts, self._buffers, strict=True)
        ]

    def _joined(self, parts: list[tuple[int, Tensor]]) -> Tensor:
        if len({part.layout for _, part in parts}) > 1:  # torch.cat does not mix them
            parts = [(start, part.to_dense()) for start, part in parts]
        first, shape = parts[0][1], self._loss.shape
        tensors: list[Tensor] = []
        filled = 0
        for start, part in [*parts, (self._loss.numel(), None)]:
            if start > filled:  # some were left out
                row = first if first.is_sparse else first.narrow(0, 0, 1)
                tensors += [torch.zeros_like(row)] * (start - filled)
            if part is not None:
                tensors.append(part)
                filled = start + part.shape[0]
        if first.is_sparse:
            return _stacked(tensors, shape)
        joined = torch.cat(tensors)
        return joined if len(shape) == 1 else joined.reshape(*shape, *first.shape[1:])


def _stacked(rows: list[Tensor], shape: Sequence[int]) -> Tensor:
    """Return sparse rows of one element each as one tensor, which torch cannot reshape."""
    for size in reversed(shape[1:]):
        groups = (rows[start : start + size] for start in range(0, len(rows), size))
        rows = [torch.cat(group).unsqueeze(0) for group in groups]
    return torch.cat(rows)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) in PLAIN_TYPES


def sequential(
    passes: JacobianPasses, loss: Tensor, variables: list[Tensor], *, retain: bool
) -> list[Tensor | None]:
    """Return the gradients of a loss of shape S, each `S + variable.shape`: a pass an element."""
    if loss.dim() == 0:
        return passes.grads([loss], [None], variables, retain=retain)
    buffer = JacobianBuffer(loss, variables)
    for element in range(loss.numel()):
        buffer.run_one(passes, element, retain=retain or element + 1 < loss.numel())
    if loss.numel():
        return buffer.result()
    shape = tuple(loss.shape)  # without elements: there is no pass that says what it reaches
    if torch.compiler.is_compiling():  # a trace has no graph to read
        return [v.new_zeros((*shape, *v.shape)) for v in variables]
    below = Subgraph([loss])
    return [zeros_for(v, shape) if below.reaches(v) else None for v in variables]


def batched(
    passes: JacobianPasses,
    loss: Tensor,
    variables: list[Tensor],
    *,
    retain: bool,
    chunk_size: int | None,
) -> list[Tensor | None]:
    """Return what `sequential` does, to rounding, in vmapped passes."""
    buffer = JacobianBuffer(loss, variables)
    # Vmapped passes keep the graph, so that `sequential` can follow a failure: the last element
    # has its own pass if the graph is to be freed.
    last = loss.numel() if retain else loss.numel() - 1
    try:
        for start in range(0, last, chunk_size or last):
            buffer.run_batch(passes, start, min(start + (chunk_size or last), last))
    except BATCH_FAILURES as error:
        if torch.compiler.is_compiling() or isinstance(error, GradkitError):
            raise
        put_hooks_back()
        warn_not_batched(f"the batched pass failed ({type(error).__name__}: {first_line(error)})")
        return sequential(passes, loss, variables, retain=retain)
    if not retain:
        buffer.run_one(passes, last, retain=False)
    return buffer.result()


_PER_ELEMENT = "gradkit.per_loss_grads(list(loss.flatten()), params), a loss for each element"


def refuse_nested(params: Params, fix: str = _PER_ELEMENT) -> None:
    """Raise for a nested tensor, whose gradients torch cannot stack: its rows differ in length."""
    for index, variable in enumerate(params.variables):
        if variable.is_nested:
            expected = "a tensor whose gradients, one for each element of a loss, can be stacked"
            where = params.path(index)
            raise UnsupportedGraphError(message(where, expected, "a nested tensor", fix))


def one_hot(loss: Tensor, start: int, stop: int) -> Tensor:
    """Return the cotangents of the elements of `loss` from `start` to `stop`, stacked."""
    rows = torch.arange(start, stop, device=loss.device)
    columns = torch.arange(loss.numel(), device=loss.device)
    # The diagonal is compared and not filled: torch.compile does not follow a write to it.
    return (rows[:, None] == columns).to(loss.dtype).view(stop - start, *loss.shape)
