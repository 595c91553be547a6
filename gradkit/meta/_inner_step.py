"""One step of an inner loop, as a function of everything that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradkit._autograd.inner_pass import inner_grads
from gradkit._checks import checkpoints, unsupported
from gradkit._compat.transforms import transforms
from gradkit._core import graph, pytree
from gradkit._core.inputs import Losses, read_losses
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, UnreachedParamError, describe, message
from gradkit.func._level import Passes, differentiate
from gradkit.meta._layout import ParamLayout
from gradkit.meta._optimizer import Columns, Optimizer, check_grads, update

Grads = list[Tensor | None]
# The loss and aux of the variables.
LossOfVariables = Callable[[list[Tensor]], tuple[Tensor, PyTree]]


class Carry(NamedTuple):
    """What each step passes to the next: the variables, and the optimizer's state of each."""

    tensors: list[Tensor]
    state: Columns


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


@dataclass(frozen=True)
class InnerStep:
    """A step of an optimizer on an inner loss."""

    loss_fn: Callable[..., Any]
    layout: ParamLayout
    opt: Optimizer
    grad_transform: Callable[[PyTree], PyTree] | None
    has_aux: bool

    def __call__(self, carry: Carry, inputs: Inputs, *, create_graph: bool) -> Outputs:
        """Run the step of a single batch; the loss carries the graph of its computation."""
        (batch,) = inputs.batches
        loss_fn = partial(self._loss, inputs.outer, batch)
        if transforms():
            loss, grads, aux = self._functional(loss_fn, carry.tensors, create_graph=create_graph)
        else:
            loss, grads, aux = _eager(loss_fn, carry.tensors, create_graph=create_graph)
        if self.grad_transform is not None:
            grads = self._transformed(self.grad_transform, grads)
        new = update(self.opt, carry.tensors, grads, carry.state, inputs.hyper)
        return Outputs(Carry(*new), [loss], [aux])

    def _loss(self, outer: PyTree, batch: PyTree, tensors: list[Tensor]) -> tuple[Tensor, PyTree]:
        returned, aux = self.loss_fn(self.layout.tree(tensors), outer, batch), None
        if self.has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise StructureError(
                    message(
                        "loss_fn",
                        "(loss, aux), with has_aux=True",
                        describe(returned),
                        "return loss, aux",
                    )
                )
            returned, aux = returned
        (loss,) = read_losses((returned,), scalar=True).leaves
        return loss.reshape(()), aux

    def _functional(
        self, loss_fn: LossOfVariables, tensors: list[Tensor], *, create_graph: bool
    ) -> tuple[Tensor, Grads, PyTree]:
        reached: list[int] = []

        def run(losses: Losses, passes: Passes) -> list[list[Tensor]]:
            grads = passes.grads_or_none(losses.leaves, create=create_graph)
            reached[:] = [index for index, grad in enumerate(grads) if grad is not None]
            return [[grad for grad in grads if grad is not None]]

        variables = self.layout.flat_variables(tensors)
        out = differentiate(loss_fn, variables, {}, run, has_aux=True, scalar=True)
        grads: Grads = [None] * len(tensors)
        for index, grad in zip(reached, out.grads[0], strict=True):
            grads[index] = grad if create_graph or grad is None else grad.detach()
        loss = out.values[0]
        return loss if create_graph else loss.detach(), grads, out.aux

    def _transformed(self, transform: Callable[[PyTree], PyTree], grads: Grads) -> Grads:
        layout = self.layout
        tree = layout.tree(grads, [None] * len(layout.leaves))
        root = "grad_transform(grads)"
        leaves = pytree.flatten_up_to(layout.spec, "params", transform(tree), root)
        pairs = zip(layout.slots, leaves, strict=True)
        movable = [None if slot is None else leaf for slot, leaf in pairs]
        check_grads(layout.leaves, movable, layout.spec, root)
        return layout.by_variable(movable)


def _eager(
    loss_fn: LossOfVariables, tensors: list[Tensor], *, create_graph: bool
) -> tuple[Tensor, Grads, PyTree]:
    with torch.enable_grad():
        # Views: what outer variables or batches share with params is not params.
        variables = [
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors
        ]
        before = checkpoints.before(variables)
        loss, aux = loss_fn(variables)
        checkpoints.refuse((loss, aux), before)
        _check_graph(loss, variables, create_graph=create_graph)
        grads = inner_grads([loss], variables, create_graph=create_graph)
    if all(grad is None for grad in grads):
        raise UnreachedParamError(_unreached())
    return loss, grads, aux


def _check_graph(loss: Tensor, variables: list[Tensor], *, create_graph: bool) -> None:
    if not loss.requires_grad:
        raise UnreachedParamError(_unreached())
    hazards = unsupported.custom_functions_alive()
    if hazards or create_graph:
        # Only this step: a walk through all steps before it would make the loop quadratic.
        stop = {graph.edge(tensor).node for tensor in variables}
        nodes = graph.nodes_below([loss], stop) | stop
        if hazards:
            unsupported.refuse_hazards(set(map(type, nodes - stop)), "the inner loss")
        if create_graph:
            unsupported.refuse_wrong_derivative("the inner loss", variables, nodes)


def _unreached() -> str:
    return message(
        "the inner loss",
        "a loss computed from params",
        "one that does not depend on them: loss_fn uses a module, or tensors, from outside",
        "compute it from loss_fn's own argument: call, params, buffers = "
        "gradkit.func.make_functional(module)",
    )
