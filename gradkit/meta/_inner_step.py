"""One step of an inner loop, as a function of everything that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradkit._autograd.engine import inner_grads
from gradkit._checks import graphs, recomputation
from gradkit._checks.derivatives import refuse_wrong_derivative
from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.graph import Subgraph, edge
from gradkit._core.losses import Losses
from gradkit._core.pytree import PyTree
from gradkit._core.user_code import custom_functions_alive
from gradkit.errors import UnreachedParamError, message
from gradkit.func._level import Passes, differentiate
from gradkit.meta._optimizer import Columns, Optimizer, check_grads, update
from gradkit.meta._trees import InnerParams, read_loss

Grads = list[Tensor | None]
# The loss and aux of a tree of params.
LossOfParams = Callable[[PyTree], tuple[Tensor, PyTree]]


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
    params: InnerParams
    opt: Optimizer
    grad_transform: Callable[[PyTree], PyTree] | None
    has_aux: bool

    def __call__(self, carry: Carry, inputs: Inputs, *, create_graph: bool) -> Outputs:
        """Run the step of a single batch; the loss carries the graph of its computation."""
        (batch,) = inputs.batches

        def loss_fn(params: PyTree) -> tuple[Tensor, PyTree]:
            returned = self.loss_fn(params, inputs.outer, batch)
            return read_loss(returned, "loss_fn", has_aux=self.has_aux)

        differentiated = self._functional if transforms() else self._eager
        loss, grads, aux = differentiated(loss_fn, carry.tensors, create_graph=create_graph)
        if self.grad_transform is not None:
            grads = self._transformed(self.grad_transform, grads)
        new = update(self.opt, carry.tensors, grads, carry.state, inputs.hyper)
        return Outputs(Carry(*new), [loss], [aux])

    def _eager(
        self, loss_fn: LossOfParams, tensors: list[Tensor], *, create_graph: bool
    ) -> tuple[Tensor, Grads, PyTree]:
        with torch.enable_grad():
            # Views: what outer variables or batches share with params is not params.
            variables = [
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors
            ]
            before = recomputation.before(variables)
            loss, aux = loss_fn(self.params.tree(variables))
            recomputation.refuse((loss, aux), before)
            if loss.requires_grad:
                _check_graph(loss, variables, create_graph=create_graph)
            grads = inner_grads([loss], variables, create_graph=create_graph)
        if all(grad is None for grad in grads):
            expected = "a loss computed from params"
            got = (
                "one that does not depend on them: loss_fn uses a module, or tensors, from outside"
            )
            fix = "compute it from loss_fn's own argument: call, params, buffers = "
            fix += "gradkit.func.make_functional(module)"
            raise UnreachedParamError(message("the inner loss", expected, got, fix))
        return loss, grads, aux

    def _functional(
        self, loss_fn: LossOfParams, tensors: list[Tensor], *, create_graph: bool
    ) -> tuple[Tensor, Grads, PyTree]:
        def run(losses: Losses, passes: Passes) -> list[Grads]:
            if not create_graph:  # nor for a transform around, which takes the step for constant
                passes = replace(passes, differentiable=False)
            options = {"retain": create_graph, "create": create_graph}
            return [passes.grads(losses.leaves, [None], passes.variables, **options)]

        arguments = self.params.arguments.at((self.params.tree(tensors),))
        out = differentiate(loss_fn, arguments, {}, run, has_aux=True, scalar=True)
        loss, grads = out.values[0], out.grads[0]
        if not create_graph:
            loss = loss.detach()
            grads = [None if grad is None else grad.detach() for grad in grads]
        return loss, grads, out.aux

    def _transformed(self, transform: Callable[[PyTree], PyTree], grads: Grads) -> Grads:
        params, root = self.params, "grad_transform(grads)"
        returned = transform(pytree.unflatten(params.spec, params.per_leaf(grads)))
        leaves = pytree.flatten_up_to(params.spec, "params", returned, root)
        pairs = zip(params.slots, leaves, strict=True)
        movable = [None if slot is None else leaf for slot, leaf in pairs]
        check_grads(params.leaves, movable, params.spec, root)
        return params.per_variable(movable)


def _check_graph(loss: Tensor, variables: list[Tensor], *, create_graph: bool) -> None:
    # Only this step: a walk through all steps before it would make the loop quadratic.
    below = Subgraph([loss], stop={edge(tensor).node for tensor in variables})
    if custom_functions_alive():
        graphs.refuse_nodes(map(type, below.nodes.difference(below.stop)), "the inner loss")
    if create_graph:
        refuse_wrong_derivative("the inner loss", variables, below)
