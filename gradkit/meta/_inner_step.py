"""A step of an inner loop, as a function of all that it reads; and steps that run twice.

A recomputed step keeps its inputs and no graph: the backward pass runs it a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._autograd.double_backward import holds_formulas
from gradkit._autograd.engine import inner_grads
from gradkit._autograd.inner_pass import InnerPass
from gradkit._checks import graphs, recomputation
from gradkit._checks.higher_derivatives import refuse_wrong_derivative
from gradkit._compat.transforms import transforms
from gradkit._core.graph import Subgraph, edge
from gradkit._core.losses import Losses
from gradkit._core.pytree import PyTree
from gradkit._core.results_without_graph import with_refused_derivatives
from gradkit._core.user_code import functions_alive, hooks_registered, user_functions
from gradkit._state.rerun import RerunState, recording_writes
from gradkit.errors import UnreachedParamError, UnsupportedGraphError, message
from gradkit.func import _checkpoints as checkpoints
from gradkit.func._differentiate import Passes, differentiate
from gradkit.meta._foreach import Tensors
from gradkit.meta._grad_transform import GradTransform
from gradkit.meta._optimizer import Columns, Optimizer, update
from gradkit.meta._optimizers import is_own_rule
from gradkit.meta._trees import (
    InnerParams,
    map_tensors,
    open_tensors,
    read_loss,
    read_loss_and_buffers,
)

Grads = list[Tensor | None]
InnerGrads: TypeAlias = tuple[Tensor, Grads, PyTree]  # the loss, its gradients, the aux
# The loss and aux of a tree of params.
LossOfParams = Callable[[PyTree], tuple[Tensor, PyTree]]


class Carry(NamedTuple):
    """What each step passes to the next: the variables, the optimizer's state of each, buffers."""

    tensors: list[Tensor]
    state: Columns
    buffers: PyTree  # None, or what the loss returns besides, for the next step


class Inputs(NamedTuple):
    """What steps read besides the carry: outer variables, hyper-parameters, a batch a step."""

    outer: PyTree
    hyper: dict[str, Any]
    batches: list[PyTree]


class Outputs(NamedTuple):
    """The carry after some steps, and the 0-dim loss and the aux of each."""

    carry: Carry
    losses: list[Tensor]
    aux: list[PyTree]
    between: list[Tensors]  # the variables after each step but the last, if asked for


Steps: TypeAlias = Callable[..., Outputs]  # run some: (carry, inputs, *, create_graph)


@dataclass(frozen=True)
class InnerStep:
    """A step of an optimizer on an inner loss."""

    loss_fn: Callable[..., Any]
    params: InnerParams
    opt: Optimizer
    grad_transform: GradTransform | None
    first_order: bool
    has_buffers: bool
    has_aux: bool

    def __call__(self, carry: Carry, inputs: Inputs, *, create_graph: bool) -> Outputs:
        """Run the step of a single batch; the loss carries the graph of its computation."""
        (batch,) = inputs.batches
        # Clones: the loss may write to them, as batch norm does.
        buffers = map_tensors(Tensor.clone, carry.buffers) if self.has_buffers else None

        def loss_fn(params: PyTree) -> tuple[Tensor, PyTree]:
            if not self.has_buffers:
                returned = self.loss_fn(params, inputs.outer, batch)
                return read_loss(returned, "loss_fn", has_aux=self.has_aux)
            returned = self.loss_fn(params, buffers, inputs.outer, batch)
            return read_loss_and_buffers(returned, carry.buffers, has_aux=self.has_aux)

        differentiated = self._functional if transforms() else self._eager
        loss, grads, aux = differentiated(loss_fn, carry.tensors, create_graph=create_graph)
        if self.has_buffers:
            buffers, aux = aux
        if self.grad_transform is not None:
            with recording_writes():
                grads = self.grad_transform(self.params, grads, inputs.outer, carry.state)
        with nullcontext() if is_own_rule(self.opt) else recording_writes():
            new = update(self.opt, carry.tensors, grads, carry.state, inputs.hyper)
        return Outputs(Carry(*new, buffers), [loss], [aux], [])

    def _eager(self, loss_fn: LossOfParams, tensors: Tensors, *, create_graph: bool) -> InnerGrads:
        twice = create_graph and not self.first_order  # whether the gradients get a graph, too
        with torch.enable_grad():
            # Views: what outer variables or batches share with params is not params.
            variables = [
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors
            ]
            before = checkpoints.before(variables)
            with recording_writes():
                loss, aux = loss_fn(self.params.tree(variables))
            recomputation.refuse((loss, aux), before)
            below = _check_graph(loss, variables, create_graph=twice)
            run = partial(
                inner_grads, [loss], variables, create_graph=twice, retain_graph=create_graph
            )
            if below is None:
                grads = run()
            else:
                one = InnerPass("the inner loss", self.params.path, variables, below)
                with recording_writes():
                    grads = one.guarded(run, create_graph=twice)
        if all(grad is None for grad in grads):
            expected = "a loss computed from params"
            got = "one that does not depend on them: loss_fn uses a module, or tensors, from "
            got += "outside"
            fix = "compute it from loss_fn's own argument: call, params, buffers = "
            fix += "gradkit.func.make_functional(module)"
            raise UnreachedParamError(message("the inner loss", expected, got, fix))
        return loss, grads, aux

    def _functional(
        self, loss_fn: LossOfParams, tensors: Tensors, *, create_graph: bool
    ) -> InnerGrads:
        def run(losses: Losses, passes: Passes) -> list[Grads]:
            variables = passes.variables
            return [passes.grads(losses.leaves, [None], variables, retain=create_graph)]

        arguments = self.params.arguments.at((self.params.tree(tensors),))
        option = None if create_graph else False
        out = differentiate(loss_fn, arguments, {}, run, has_aux=True, create_graph=option)
        grads = out.grads[0]
        if self.first_order:
            grads = [grad if grad is None else grad.detach() for grad in grads]
        elif out.refused is not None:
            grads = with_refused_derivatives(grads, out.values, out.refused)
        return out.values[0], grads, out.aux


def _check_graph(loss: Tensor, variables: list[Tensor], *, create_graph: bool) -> Subgraph | None:
    """Check the graph of a step, and return it if its pass is to be guarded."""
    alive = functions_alive()
    if not loss.requires_grad or not (create_graph or any(alive) or hooks_registered()):
        return None
    # Only this step: a walk through all steps before it would make the loop quadratic.
    nodes = [tensor.grad_fn or edge(tensor).node for tensor in variables]
    below = Subgraph([loss], stop=set(nodes))
    if alive.refused:
        graphs.refuse_nodes(map(type, below.nodes.difference(below.stop)), "the inner loss")
    if create_graph:
        refuse_wrong_derivative(lambda: "the inner loss", variables, below, by_formula=True)
    # Those that are alive may be the steps before this one.
    runs_user_code = hooks_registered() or (alive.users and user_functions(below.kinds))
    return below if runs_user_code or (create_graph and holds_formulas(below)) else None


def recomputed(run: Steps, carry: Carry, inputs: Inputs) -> Outputs:
    """Run steps without keeping their graph; gradients flow to the carry and the inputs."""
    tensors, close = open_tensors((carry, inputs))
    segment = _Segment(run, close, len(carry.tensors), RerunState(tensors))
    outputs = _Recomputed.apply(segment, *tensors)  # type: ignore[no-untyped-call]
    return cast("Outputs", segment.close_outputs(outputs))


@dataclass
class _Segment:
    """Some steps as a function of a list of tensors, the variables first, that runs twice."""

    run: Steps
    close: Callable[[Iterable[Tensor]], Any]
    variables: int  # the number of them
    state: RerunState
    close_outputs: Callable[[Iterable[Tensor]], Any] = field(init=False)
    constants: set[int] = field(init=False)  # the ids of the buffers that carry no graph

    def _flat_run(self, tensors: Sequence[Tensor], *, create_graph: bool) -> list[Tensor]:
        steps_done = self.run(*self.close(tensors), create_graph=create_graph)
        buffers, _ = open_tensors(steps_done.carry.buffers)
        self.constants = {id(x) for x in buffers if not x.requires_grad}
        outputs, self.close_outputs = open_tensors(steps_done)
        return outputs

    def values(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the steps for their values; return them, and those that have no gradient."""
        with torch.enable_grad(), self.state.first_run():
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            for variable in inputs[: self.variables]:
                variable.requires_grad_()
            outputs = self._flat_run(inputs, create_graph=False)
        try:
            _refuse_captured(outputs, inputs)
        except UnsupportedGraphError:
            self.state.undo()
            raise
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
            one = InnerPass("loss_fn", "its input {}".format, variables, below)
            run_pass = partial(
                inner_grads, outputs, variables, cotangents, create_graph=create_graph
            )
            reached = iter(one.guarded(run_pass, create_graph=create_graph))
        return [next(reached) if need else None for need in needed]


def _refuse_captured(outputs: Tensors, inputs: Tensors) -> None:
    """Raise if the steps used a tensor that requires grad and is not among their inputs."""
    leaves = Subgraph(outputs).leaves
    if {key for key in leaves if leaves[key].requires_grad} - set(map(id, inputs)):
        expected = "a function of its arguments, where its steps are recomputed"
        got = "one that uses a tensor from outside that requires grad: its gradient would be lost"
        fix = 'pass it in outer, not inside a module: unroll(..., outer={"name": tensor}), which '
        fix += 'grad_transform(grads, outer, state) gets, too; or memory="store"'
        raise UnsupportedGraphError(message("loss_fn", expected, got, fix))


class _Recomputed(torch.autograd.Function):
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
