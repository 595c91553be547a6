"""One pass through the graph of losses that exist, and whose its results are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from gradkit._autograd.captures import ArrivalCapture, any_observers, observed
from gradkit._autograd.engine import run_backward, run_grad
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.ownership import own
from gradkit._state.grad_writes import grads_put_back


@dataclass(frozen=True)
class PassRunner:
    """Runs the passes of a call.

    Attributes:
        call: The call.
        weights: Weights of the losses that are part of the graph.
    """

    call: Call
    weights: Sequence[Tensor] = ()

    @property
    def create_graph(self) -> bool:
        """Whether the gradients carry a graph."""
        return self.call.create_graph

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of one pass, owned unless they carry a graph.

        A seed is the cotangent of an output, of its shape; None is ones.
        """
        if self._is_plain and not any_observers():
            grads = run_grad(self.call, outputs, variables, seeds, retain_graph=retain)
        else:
            grads = self._observed_grads(outputs, seeds, variables, retain=retain)
        return grads if self.call.create_graph else _owned(grads, variables)

    def _observed_grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        extra = observed()
        inputs: list[Any] = [*variables, *(edge for _, edge in extra)]
        copies = self.copies_on_arrival
        with ExitStack() as stack:
            tensors = (*variables, *(tensor for tensor, _ in extra))
            stack.enter_context(grads_put_back(self.retained(tensors)))
            if self.call.plain_leaves and not copies:
                grads = run_grad(self.call, outputs, inputs, seeds, retain_graph=retain)
                return grads[: len(variables)]
            capture = ArrivalCapture(
                variables, stack, create_graph=self.call.create_graph, copy_leaves=copies
            )
            roots, cotangents = [*outputs, capture.root], [*seeds, None]
            inputs.append(capture.leaf)
            grads = run_grad(self.call, roots, inputs, cotangents, retain_graph=retain)
            return capture.replace(grads[: len(variables)])

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of one vmapped pass, which keeps the graph; they may share memory.

        From seeds of shape `[B, *output.shape]` to gradients of shape `[B, *variable.shape]`.
        """
        return run_grad(
            self.call, [output], variables, [seeds], retain_graph=True, is_grads_batched=True
        )

    def backward(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor] | None,
        *,
        retain: bool,
    ) -> None:
        """Run one pass that accumulates into `.grad` of some leaves, or of all if None."""
        run_backward(self.call, outputs, seeds, variables, retain_graph=retain)

    @cached_property
    def _is_plain(self) -> bool:
        return (
            self.call.plain_leaves
            and not self.copies_on_arrival
            and not any(tensor.retains_grad for tensor in self._roots)
        )

    @property
    def _roots(self) -> tuple[Tensor, ...]:
        return (*self.call.losses.leaves, *self.weights)

    @cached_property
    def copies_on_arrival(self) -> bool:
        """Whether a hook, or a custom Function in the graph, could write on a captured gradient."""
        if user_code.hooks_registered():
            return True
        call = self.call
        if call.plain_leaves and not call.may_hold_functions:
            return False
        return bool(user_code.user_functions(call.graph.below(call.differentiated).kinds))

    def retained(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the non-leaf tensors whose `.grad` a pass writes, since retain_grad() was called.

        Of those given, and of the losses and weights [D4].
        """
        every = {id(tensor): tensor for tensor in (*self._roots, *tensors)}.values()
        return [tensor for tensor in every if tensor.retains_grad and not tensor.is_leaf]


def _owned(grads: list[Tensor | None], variables: list[Tensor]) -> list[Tensor | None]:
    present = [index for index, grad in enumerate(grads) if grad is not None]
    if len(present) == len(grads):
        own(cast("list[Tensor]", grads), variables)
        return grads
    dense = [grad for grad in grads if grad is not None]
    grads.clear()  # `own` looks for other references
    own(dense, [variables[index] for index in present])
    by_index = dict(zip(present, dense, strict=True))
    return [by_index.get(index) for index in range(len(variables))]
