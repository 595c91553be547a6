"""One step of an inner loop, as a function of everything that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradkit._checks import checkpoints, unsupported
from gradkit._compat.transforms import transforms
from gradkit._core import graph, pytree
from gradkit._core.losses import Losses, read_losses
from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, UnreachedParamError, describe, message
from gradkit.func._level import Passes, differentiate
from gradkit.func._variables import Variables
from gradkit.meta._optimizer import Optimizer

Grads = list[Tensor | None]


@dataclass(frozen=True)
class Carry:
    """What goes from step to step.

    Attributes:
        tensors: The variables, each once.
        state: What the optimizer holds for each, by name.
    """

    tensors: list[Tensor]
    state: dict[str, list[Any]]


@dataclass(frozen=True)
class StepInputs:
    """What a step reads beside the carry.

    Attributes:
        outer: The outer variables.
        hyper: The hyper-parameters, with trees as lists for the variables.
        batch: The data.
    """

    outer: PyTree
    hyper: Mapping[str, Any]
    batch: PyTree


@dataclass(frozen=True)
class Inner:
    """What does not change from step to step.

    Attributes:
        loss_fn: The inner loss, of params, outer variables and a batch.
        given: The structure of params, and where each variable stands in it.
        opt: The optimizer.
        grad_transform: A function on trees of gradients, or None.
        has_aux: The loss comes with an aux.
    """

    loss_fn: Callable[..., Any]
    given: Variables
    opt: Optimizer
    grad_transform: Callable[[PyTree], PyTree] | None
    has_aux: bool

    def step(
        self, carry: Carry, reads: StepInputs, *, create: bool
    ) -> tuple[Carry, Tensor, PyTree]:
        """Return the carry after a step, the inner loss, and aux.

        Args:
            carry: The carry before it.
            reads: What else it reads.
            create: Whether the gradient has a graph of its own.

        Returns:
            The new carry, a 0-dim loss, whose graph tells what it was computed from, and a tree, or
            None.
        """
        gradient = self._functional if transforms() else self._eager
        value, grads, aux = gradient(carry.tensors, reads, create=create)
        if self.grad_transform is not None:
            grads = self._transformed(grads)
        new, state = self.opt.step(carry.tensors, grads, carry.state, **reads.hyper)
        return Carry(new, state), value, aux

    def _eager(
        self, tensors: list[Tensor], reads: StepInputs, *, create: bool
    ) -> tuple[Tensor, Grads, PyTree]:
        with torch.enable_grad():
            # Views: what outer variables or batches share with params is not params.
            at = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
            (params,) = self.given.with_tensors(at)
            was = checkpoints.before(at)
            loss, aux = self._loss(self.loss_fn(params, reads.outer, reads.batch))
            checkpoints.refuse((loss, aux), was)
            _refuse(loss, at, create=create)
            grads = torch.autograd.grad(loss, at, create_graph=create, allow_unused=True)
        if all(grad is None for grad in grads):
            raise UnreachedParamError(_nothing_reached())
        return loss, list(grads), aux

    def _functional(
        self, tensors: list[Tensor], reads: StepInputs, *, create: bool
    ) -> tuple[Tensor, Grads, PyTree]:
        reached: list[int] = []

        def run(losses: Losses, passes: Passes) -> list[list[Tensor]]:
            found = passes.grads_or_none(losses.leaves, create=create)
            reached[:] = [i for i, grad in enumerate(found) if grad is not None]
            return [[grad for grad in found if grad is not None]]

        def loss_and_aux(params: PyTree) -> tuple[Tensor, PyTree]:
            return self._loss(self.loss_fn(params, reads.outer, reads.batch))

        here = self.given.at(self.given.with_tensors(tensors))
        out = differentiate(loss_and_aux, here, {}, run, has_aux=True, scalar=True)
        grads: Grads = [None] * len(tensors)
        for index, grad in zip(reached, out.grads[0], strict=True):
            grads[index] = grad if create or grad is None else grad.detach()
        value = out.values[0]
        return value if create else value.detach(), grads, out.aux

    def _loss(self, returned: Any) -> tuple[Tensor, PyTree]:
        loss, aux = returned, None
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
            loss, aux = returned
        (leaf,) = read_losses((loss,), scalar=True).leaves
        return leaf.reshape(()), aux

    def _transformed(self, grads: Grads) -> Grads:
        assert self.grad_transform is not None
        tree = pytree.unflatten(
            self.given.spec, [None if slot is None else grads[slot] for slot in self.given.slots]
        )[0]
        leaves = pytree.flatten_up_to(
            pytree.flatten(tree)[1], "params", self.grad_transform(tree), "grad_transform(grads)"
        )
        return [leaves[self.given.slots.index(slot)] for slot in range(len(grads))]


def _refuse(loss: Tensor, tensors: list[Tensor], *, create: bool) -> None:
    if not loss.requires_grad:
        raise UnreachedParamError(_nothing_reached())
    hazards = unsupported.custom_functions_alive()
    if hazards or create:
        # Only this step: a walk through all steps before it would make the loop quadratic.
        stop = {graph.edge(tensor).node for tensor in tensors}
        nodes = graph.nodes_below([loss], stop) | stop
        if hazards:
            unsupported.refuse_hazards(set(map(type, nodes - stop)), "the inner loss")
        if create:
            unsupported.refuse_wrong_derivative("the inner loss", tensors, nodes)


def _nothing_reached() -> str:
    return message(
        "the inner loss",
        "a loss computed from params",
        "one that does not depend on them: loss_fn uses a module, or tensors, from outside",
        "compute it from loss_fn's own argument: call, params, buffers = "
        "gradkit.func.make_functional(module)",
    )
