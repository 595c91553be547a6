"""The gradients of samples from one pass for all of them, where the graph shows them independent.

A sample's gradient of a shared variable is a product of what the layer has saved and the cotangent
of what it returned, of which the pass for the sum of the losses has a row for each sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradkit._autograd.engine import numbered_roots, run_grad
from gradkit._autograd.release import release
from gradkit._autograd.sample_rules import (
    NotProvedError,
    PerSampleGrads,
    SharedOperand,
    uses_shared_by_samples,
)
from gradkit._checks.checked import is_checked
from gradkit._compat.autograd import calling_thread, current_pass, named_thread, record_stream
from gradkit._compat.nodes import any_sparse_gradients
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.call import Call, Grads
from gradkit._core.grad_recorder import any_observers
from gradkit._core.leaf_arithmetic import without_autocast
from gradkit._core.ownership import grad_dtype, own

_DTYPES = {(torch.float32, torch.float32), (torch.float64, torch.float64)}  # and of the gradient
Uses: TypeAlias = Sequence[SharedOperand]
Result = TypeVar("Result")


def may_run(call: Call, loss: Tensor) -> bool:
    """Return whether nothing but the operations of the graph changes or reads a cotangent."""
    # A gradient in float16 that is not finite would get a norm that is.
    dtypes = {(x.dtype, grad_dtype(x)) for params in call.params for x in params.variables}
    return (
        call.no_subclasses
        and call.only_leaves
        and dtypes <= _DTYPES
        and not loss.retains_grad
        and not user_code.hooks_registered()
        and not is_checked()
        and current_pass() == -1  # a pass around might meet the same nodes
    )


def uses_by_loss(call: Call, least: int) -> dict[int, Uses]:
    """Return, for losses of so many elements, each of an independent sample, what these share."""
    every: dict[int, Uses] = {}
    if call.create_graph or any_observers():
        return every
    for (index,), params in call.passes:
        loss = call.outputs[index]
        if loss.numel() >= least and may_run(call, loss):
            try:
                uses = uses_shared_by_samples(loss, call.graph.below([index]), params.variables)
            except NotProvedError:
                continue
            if not any_sparse_gradients(use.node for use in uses):
                every[index] = uses
    return every


def run_samples(
    call: Call, index: int, uses: Uses, variables: Sequence[Tensor], *, retain: bool
) -> Grads:
    """Return the gradients of the elements of a loss, each `loss.shape + variable.shape`."""
    by_number = SamplePass(uses, variables, grads_of).run(call, index, retain=retain)
    numbers, shape = list(by_number), tuple(call.outputs[index].shape)
    present = [by_number.pop(number) for number in numbers]
    if len(shape) > 1:
        present = [grad.reshape(*shape, *grad.shape[1:]) for grad in present]
    own(present, [variables[number] for number in numbers], shape)
    by_number = dict(zip(numbers, present, strict=True))
    return [by_number.get(number) for number in range(len(variables))]


class SamplePass(Generic[Result]):
    """A pass that makes something of the gradients of a variable once its last use is reached."""

    def __init__(
        self,
        uses: Uses,
        variables: Sequence[Tensor],
        finish: Callable[[list[PerSampleGrads], Tensor], Result],
    ) -> None:
        # `finish` gets the parts of which the gradients of a variable are the sum.
        self._variables, self._finish_parts = variables, finish
        self._by_node: dict[Node, list[SharedOperand]] = defaultdict(list)
        self._left: dict[int, int] = defaultdict(int)  # how many uses of a variable are to come
        for use in uses:
            self._by_node[use.node].append(use)
            self._left[use.variable] += 1
        self._parts: dict[int, list[PerSampleGrads]] = defaultdict(list)
        self._finished: dict[int, Result] = {}

    def run(self, call: Call, index: int, *, retain: bool = True) -> dict[int, Result]:
        """Return what was made, by the number of the variable, of those that are reached."""
        if not self._by_node:
            return {}
        loss = call.outputs[index]
        # The engine does not execute those that it captures, so that no gradient of a variable is
        # computed; those that are above others it executes, and their cotangents are then free.
        captured = [node for node, (use, *_) in self._by_node.items() if use.is_last]
        with undo_stack() as stack, torch.no_grad(), INSIDE:  # the engine's threads get these, too
            self._thread = stack.enter_context(named_thread())
            for device in {variable.device for variable in self._variables}:
                stack.enter_context(without_autocast(device))
            hooks = [
                partial(node.register_prehook, partial(self._arrive, node))
                for node in self._by_node.keys() - captured
            ]
            stack.callback(user_code.remove_hooks, user_code.register_own_hooks(*hooks))
            roots = stack.enter_context(numbered_roots([loss]))
            edges = [GradientEdge(node, 0) for node in captured]
            grads = run_grad(call, roots, edges, [None], retain_graph=retain)
            for node in captured:
                self._add(node, grads.pop(0))
            for number in list(self._parts):
                self._finish(number)  # a use of this one was not reached
            record_stream(chain.from_iterable(map(_tensors, self._finished.values())))
        if not retain:
            release(captured)
        return self._finished

    def _arrive(self, node: Node, cotangents: user_code.Cotangents) -> None:
        if calling_thread() == self._thread:  # others have passes of their own
            self._add(node, cotangents[0])

    def _add(self, node: Node, cotangent: Tensor | None) -> None:
        for use in self._by_node[node]:
            number = use.variable
            self._left[number] -= 1
            if cotangent is not None:
                self._parts[number].append(use.rule(use, cotangent, self._variables[number]))
                if not self._left[number]:
                    self._finish(number)

    def _finish(self, number: int) -> None:
        parts, variable = self._parts.pop(number), self._variables[number]
        record_stream(chain.from_iterable(map(_tensors, parts)))
        self._finished[number] = self._finish_parts(parts, variable)


def _tensors(made: Any) -> Sequence[Tensor | None]:
    """Return the tensors of what was made of gradients: one, or a tuple of some."""
    return made if isinstance(made, tuple) else (made,)


def grads_of(parts: list[PerSampleGrads], variable: Tensor) -> Tensor:
    """Return the sum of the parts: the gradients of the samples, `[B, *shape]`."""
    total = _dense(parts[0], variable)
    for part in parts[1:]:
        total = total + _dense(part, variable)
    return total


def _dense(part: PerSampleGrads, variable: Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    left, right = part
    if left.dim() == 3:
        # The product of one position is no sum: batched kernels take half as long again for it.
        return left.mT * right if right.shape[1] == 1 else left.mT @ right
    zeros = right.new_zeros(len(right), *variable.shape)
    return zeros.scatter_add_(1, left.unsqueeze(2).expand_as(right), right)
