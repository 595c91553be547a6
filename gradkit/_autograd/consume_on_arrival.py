"""Gradients that are consumed as they arrive in a pass, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.arrival_copies import copied_on_arrival, hooks_refused
from gradkit._autograd.engine import own_roots, run_batch, run_grad
from gradkit._autograd.passes import PassRunner
from gradkit._checks.checked import is_checked
from gradkit._checks.circumstances import USER_CODE, around
from gradkit._checks.modified_tensors import functions_above_hidden, refuse_pre_hooks
from gradkit._compat.autograd import (
    as_batch,
    batched_mode,
    current_pass,
    from_batch,
    tensor_hooks,
    without_function_modes,
)
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.grad_recorder import any_observers

# A Consume gets the number of a variable, and its gradient, or a stack of its gradients.
Consume: TypeAlias = Callable[[int, Tensor], None]


@dataclass(slots=True)
class ConsumingRunner(PassRunner):
    """Runs passes whose gradients are consumed as they arrive."""

    consume: Consume = field(kw_only=True)  # is called with each, on which it may not write

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
        shared: bool = False,
    ) -> list[Tensor | None]:
        """Run one pass, and return what the engine captured: None where no gradient arrived."""
        refuse_pre_hooks(self.call)
        # Gradients are copied as they arrive inside `checked()`; those that a Function writes into
        # `.grad` are whole at the end of the pass only.
        users = self.call.functions.users
        if is_checked() or (users and functions_above_hidden(self.call, variables)):
            grads = PassRunner.grads(self, outputs, seeds, variables, retain=retain)
            for index, grad in enumerate(grads):
                if grad is not None:
                    self.consume(index, grad)
            return grads
        versions: dict[int, int] = {}
        hooked = {id(variable) for variable in variables if tensor_hooks(variable)}

        def consume(index: int, grad: Tensor) -> None:
            if grad._version and id(variables[index]) not in hooked:
                versions[index] = grad._version
            self.consume(index, grad)

        arrivals = Arrivals(variables, consume)
        effects = self.side_effects(variables, retain=retain) if users else INSIDE
        with effects as written, INSIDE:
            with self.observed_inputs(variables) as inputs, arrivals.from_roots(outputs) as roots:
                captured = run_grad(self.call, roots, inputs, seeds, retain_graph=retain)
            if written is not None:
                written.refuse(self.call.losses.first_paths)
        # The pass itself may have registered the first hook of the process.
        if versions and (around(self.call) & USER_CODE or user_code.hooks_registered()):
            self.guarded(outputs, variables).refuse_modified(versions)
        return captured[: len(variables)]

    def batch(
        self, outputs: Sequence[Tensor], seeds: Sequence[Tensor], variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Run one vmapped pass, which keeps the graph; seeds, and what is consumed, are stacks."""
        with batched_mode() as level, undo_stack() as stack:
            size = len(seeds[0])

            def consume(index: int, grad: Tensor) -> None:
                self.consume(index, from_batch(grad, level, size))

            arrivals = Arrivals(variables, consume, without_function_modes)
            inputs = stack.enter_context(self.observed_inputs(variables))
            roots = stack.enter_context(arrivals.from_roots(outputs))
            cotangents = [as_batch(seed, level) for seed in seeds]
            with hooks_refused(roots) as first:
                captured = run_batch(self.call, first, inputs, cotangents)
            return captured[: len(variables)]


class Arrivals:
    """Consumes the gradients of one pass as they arrive, and hands the engine placeholders."""

    def __init__(
        self,
        variables: Sequence[Tensor],
        consume: Consume,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._variables, self._consume, self._around = variables, consume, around
        self._own_passes: set[int] = set()
        # An observer may be for the same tensors.
        self._is_captured_too = any_observers()

    @contextmanager
    def from_roots(self, outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield what the pass has to start from."""
        numbered = list(enumerate(self._variables))
        leaves = [(index, v) for index, v in numbered if v.grad_fn is None]
        others = [(index, v) for index, v in numbered if v.grad_fn is not None]
        hooks: Any = [partial(self._arrive_at_leaf, index) for index, _ in leaves]
        with undo_stack() as stack:
            stack.enter_context(copied_on_arrival([leaf for _, leaf in leaves], hooks))
            for index, variable in others:
                hook = partial(self._arrive, index)
                stack.callback(user_code.register_own_hook(variable, hook).remove)
            yield stack.enter_context(own_roots(outputs, self._own_passes.add))

    def _arrive(self, index: int, grad: Tensor | None) -> None:
        if grad is not None and current_pass() in self._own_passes:
            with self._around(), INSIDE:
                self._consume(index, grad)

    def _arrive_at_leaf(self, index: int, grad: Tensor | None) -> Tensor | None:
        if grad is None or current_pass() not in self._own_passes:
            return grad
        with self._around(), INSIDE:
            self._consume(index, grad)
            return grad if self._is_captured_too else _placeholder(grad)


def _placeholder(grad: Tensor) -> Tensor:
    """Return what the engine takes in place of a gradient: a tensor without memory."""
    if grad.is_sparse:
        return torch.zeros_like(grad)
    if type(grad) is not Tensor or grad.layout != torch.strided:
        return grad
    return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
