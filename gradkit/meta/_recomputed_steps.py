"""Steps that the backward pass recomputes: they keep their inputs, and no graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._autograd.engine import inner_grads
from gradkit._autograd.passes import InnerPass
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._core import pytree
from gradkit._core.graph import Subgraph, edge
from gradkit._state.rerun import RerunState
from gradkit.meta._inner_step import Carry, StepInputs, StepOutputs, Steps, refuse_captured


def run_recomputed(run: Steps, carry: Carry, inputs: StepInputs) -> StepOutputs:
    """Run steps without keeping their graph; gradients flow to the carry and the inputs."""
    tensors, rebuild = pytree.partition_tensors((carry, inputs))
    segment = _Segment(run, rebuild, len(carry.tensors), RerunState(tensors))
    outputs = _RecomputedSteps.apply(segment, *tensors)  # type: ignore[no-untyped-call]
    return cast("StepOutputs", segment.rebuild_outputs(outputs))


@dataclass
class _Segment:
    """Some steps as a function of a list of tensors, the variables first, that runs twice."""

    run: Steps
    rebuild: Callable[[Iterable[Tensor]], Any]
    variables: int  # the number of them
    state: RerunState
    rebuild_outputs: Callable[[Iterable[Tensor]], Any] = field(init=False)
    constants: set[int] = field(init=False)  # the ids of the buffers that carry no graph

    def _flat_run(self, tensors: Sequence[Tensor], *, create_graph: bool) -> list[Tensor]:
        steps_done = self.run(*self.rebuild(tensors), create_graph=create_graph)
        buffers, _ = pytree.partition_tensors(steps_done.carry.buffers)
        self.constants = {id(x) for x in buffers if not x.requires_grad}
        outputs, self.rebuild_outputs = pytree.partition_tensors(steps_done)
        return outputs

    def values(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the steps for their values; return them, and those that have no gradient."""
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        for variable in inputs[: self.variables]:
            variable.requires_grad_()
        with torch.enable_grad(), self.state.first_run():
            outputs = self._flat_run(inputs, create_graph=False)
        refuse_captured("loss_fn", Subgraph(outputs), inputs, self.state.made)
        self.state.record_outputs(outputs)
        values = [x.detach().clone() for x in outputs]
        pairs = zip(values, outputs, strict=True)
        return values, [value for value, x in pairs if id(x) in self.constants]

    def grads(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Run the steps a second time, and a backward pass through them."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad(), self.state.second_run() as run:
            if create_graph:
                # Views: the pass ends at these steps, and does not go on through those before.
                inputs = [t.view_as(t) if t.requires_grad else t for t in tensors]
            else:
                pairs = zip(tensors, needed, strict=True)
                inputs = [t.detach().requires_grad_(need) for t, need in pairs]
            variables = list(compress(inputs, needed))
            outputs = self._flat_run(inputs, create_graph=True)
            run.compare(outputs, "loss_fn")
            below = Subgraph(outputs, stop={edge(variable).node for variable in variables})
            if create_graph:
                refuse_wrong_derivative(lambda: "loss_fn", variables, below, by_formula=True)
            one = InnerPass("loss_fn", "its input {}".format, variables, below, cotangents)
            run_pass = partial(
                inner_grads, outputs, variables, cotangents, create_graph=create_graph
            )
            reached = iter(one.guarded(run_pass, create_graph=create_graph))
        return [next(reached) if need else None for need in needed]


class _RecomputedSteps(torch.autograd.Function):
    """A segment as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, segment: _Segment, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.segment = segment
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        values, constants = segment.values(tensors)
        # Statistics that required grad would be refused by batch norm in the next step.
        ctx.mark_non_differentiable(*constants)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        return (None, *ctx.segment.grads(ctx.saved_tensors, cotangents, needed))
