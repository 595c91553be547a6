"""A batch that is encoded in chunks, each a second time for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradkit._autograd.engine import inner_grads
from gradkit._autograd.passes import InnerPass
from gradkit._checks import eager_graph, recomputations
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import read_losses
from gradkit._core.graph import Subgraph
from gradkit._core.pytree import PyTree, Structure
from gradkit._state.rerun import RerunState, recording_writes
from gradkit.func import _checkpoints as checkpoints
from gradkit.func._arguments import Arguments
from gradkit.func._chunks import Batch, joined, separated
from gradkit.func._differentiate import detached


class _EncodedChunk(NamedTuple):
    """What a run of the function made, with its graph."""

    variables: list[Tensor]
    outputs: list[Tensor]
    spec: Structure
    below: Subgraph

    def values(self) -> PyTree:
        """Return the outputs without the graph."""
        return pytree.unflatten(self.spec, detached(self.outputs))


class EncoderStage:
    """The outputs of a function for a whole batch, and the gradients of each chunk."""

    def __init__(
        self,
        encode: Callable[..., Any],
        arguments: Arguments,
        batch: Batch,
        chunk_size: int | None,
    ) -> None:
        self._encode, self._arguments = encode, arguments
        self._chunks = batch.chunks(chunk_size)
        self.is_differentiable = False  # whether an output depends on the variables
        self.captured: dict[int, Tensor] = {}  # what requires grad, and is no variable, by id
        self._only_run: _EncodedChunk | None = None  # if there is one chunk: it runs once
        self._states: list[RerunState] = []
        self._row_counts: list[list[int]] = []  # of each output, by chunk

    def outputs(self) -> PyTree:
        """Return the outputs for all chunks; several leave no graph."""
        if len(self._chunks) == 1:
            self._only_run = self._run(self._chunks[0])
            return self._only_run.values()
        outputs = []
        for chunk in self._chunks:
            state = RerunState([*self._arguments.variables, *pytree.tensors(chunk)])
            with state.first_run():
                run = self._run(chunk)
            state.record_outputs(run.outputs)
            self._states.append(state)
            outputs.append(run.values())
            del run  # and with it the graph, before the next one is made
        values, self._row_counts = joined(outputs, "encode(params, chunk)")
        return values

    def grads(self, cotangents: PyTree) -> Iterator[list[Tensor | None]]:
        """Yield the gradients of each chunk, one for each variable."""
        if self._only_run is not None:
            yield self._pass(self._only_run, cotangents)
            return
        parts = separated(cotangents, self._row_counts)
        for chunk, state, part in zip(self._chunks, self._states, parts, strict=True):
            with state.second_run() as second:
                run = self._run(chunk)
                second.compare(run.outputs, "encode")
                grads = self._pass(run, part)
            del run  # and with it the graph, before the next one is made
            yield grads

    def _run(self, chunk: PyTree) -> _EncodedChunk:
        with torch.enable_grad(), INSIDE:
            variables = [x.detach().requires_grad_() for x in self._arguments.variables]
            before = checkpoints.before(variables)
            with recording_writes():
                returned = self._encode(*self._arguments.with_variables(variables), chunk)
            recomputations.refuse(returned, before)
        outputs = read_losses(returned, scalar=False, returned=True)
        below = Subgraph(outputs.leaves)
        captured = {id(x): x for x in below.leaves.values() if x.requires_grad}
        for variable in variables:
            self.is_differentiable |= captured.pop(id(variable), None) is not None
        self.captured |= captured
        return _EncodedChunk(variables, outputs.leaves, outputs.spec, below)

    def _pass(self, run: _EncodedChunk, cotangents: PyTree) -> list[Tensor | None]:
        seeds: Sequence[Tensor] = pytree.flatten(cotangents)[0]
        eager_graph.refuse_nodes(map(type, run.below.nodes), "encode")
        one = InnerPass("encode", self._arguments.path, run.variables, run.below)
        return one.guarded(
            partial(inner_grads, run.outputs, run.variables, seeds), create_graph=False
        )
