"""Steps that keep their inputs and no graph: the backward pass runs them a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._autograd.engine import inner_grads
from gradkit._checks.derivatives import refuse_wrong_derivative
from gradkit._core.graph import Subgraph, edge
from gradkit._state.recompute_state import RecomputeState
from gradkit.errors import UnsupportedGraphError, message
from gradkit.meta._inner_step import Carry, Inputs, Outputs
from gradkit.meta._trees import open_tensors

# Runs some steps: (carry, inputs, *, create_graph).
Steps: TypeAlias = Callable[..., Outputs]


def recomputed(run: Steps, carry: Carry, inputs: Inputs) -> Outputs:
    """Run steps without keeping their graph; gradients flow to the carry and the inputs."""
    tensors, close = open_tensors((carry, inputs))
    segment = _Segment(run, close, len(carry.tensors), RecomputeState(tensors))
    outputs = _Recomputed.apply(segment, *tensors)  # type: ignore[no-untyped-call]
    return cast("Outputs", segment.close_outputs(outputs))


@dataclass
class _Segment:
    """Some steps as a function of a list of tensors, the variables first, that runs twice."""

    run: Steps
    close: Callable[[Iterable[Tensor]], Any]
    variables: int  # the number of them
    state: RecomputeState
    close_outputs: Callable[[Iterable[Tensor]], Any] = field(init=False)

    def _flat_run(self, tensors: Sequence[Tensor], *, create_graph: bool) -> list[Tensor]:
        steps_done = self.run(*self.close(tensors), create_graph=create_graph)
        outputs, self.close_outputs = open_tensors(steps_done)
        return outputs

    def values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the steps for their values."""
        with torch.enable_grad(), self.state.first_run():
            inputs = [
                t.detach().requires_grad_(t.requires_grad or index < self.variables)
                for index, t in enumerate(tensors)
            ]
            outputs = self._flat_run(inputs, create_graph=False)
        try:
            _refuse_captured(outputs, inputs)
        except UnsupportedGraphError:
            self.state.undo()
            raise
        self.state.record_outputs(outputs)
        return tuple(x.detach().clone() for x in outputs)

    def grads(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run the steps a second time, and a backward pass through them."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad(), self.state.second_run():
            if create_graph:
                # Views: the pass ends at these steps, and does not go on through those before.
                inputs = [t.view_as(t) if t.requires_grad else t for t in tensors]
            else:
                pairs = zip(tensors, needed, strict=True)
                inputs = [t.detach().requires_grad_(need) for t, need in pairs]
            variables = list(compress(inputs, needed))
            outputs = self._flat_run(inputs, create_graph=True)
            self.state.check_outputs(outputs, "loss_fn")
            if create_graph:
                stop = {edge(variable).node for variable in variables}
                refuse_wrong_derivative("loss_fn", variables, Subgraph(outputs, stop))
            reached = iter(inner_grads(outputs, variables, cotangents, create_graph=create_graph))
        return [next(reached) if need else None for need in needed]


def _refuse_captured(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise if the steps used a tensor that requires grad and is not among their inputs."""
    if Subgraph(outputs).leaves.keys() - set(map(id, inputs)):
        expected = "a function of its arguments, where its steps are recomputed"
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix = 'pass it in outer, not inside a module: unroll(..., outer={"name": tensor}); or '
        fix += 'memory="store"'
        raise UnsupportedGraphError(message("loss_fn", expected, got, fix))


class _Recomputed(torch.autograd.Function):
    """A segment as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return segment.values(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        return (None, *ctx.segment.grads(ctx.saved_tensors, cotangents, needed))
