"""One pass through the graph of losses that exist, and whose its results are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradkit._autograd.arrival_copies import ArrivalCapture
from gradkit._autograd.engine import run_backward, run_batch, run_grad
from gradkit._autograd.hooks_in_batches import hooks_refused
from gradkit._autograd.unshared_memory import without_shared_memory
from gradkit._autograd.write_finder import WriteFinder
from gradkit._checks.checked import step_monitor
from gradkit._checks.modified_gradients import (
    grad_versions,
    refuse_modified,
    user_code_may_run_in,
    variables_to_copy,
)
from gradkit._compat.autograd import as_batch, batched_mode, from_batch, without_function_modes
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core.call import Call
from gradkit._core.grad_recorder import any_observers, observed_tensors
from gradkit._core.graph import Subgraph
from gradkit._core.ownership import owned
from gradkit._core.params import Params
from gradkit._state.grad_attribute import grads_put_back


@dataclass(slots=True)
class PassRunner:
    """Runs the passes of a call."""

    call: Call
    weights: Sequence[Tensor] = ()  # of the losses: those that are part of the graph
    _copied_variables: dict[int, tuple[list[Tensor], bool]] = field(default_factory=dict)

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
        """Return the gradients of one pass of the call, owned unless they carry a graph."""
        # A seed is the cotangent of an output, of its shape; None is ones.
        copied, is_unhooked = self.look_for_hooks(variables)
        versions: dict[int, int] = {}
        if not is_unhooked or any_observers():
            grads, versions = self._captured_grads(outputs, seeds, variables, copied, retain=retain)
        else:
            grads = run_grad(self.call, outputs, variables, seeds, retain_graph=retain)
        if len(copied) < len(variables) and user_code_may_run_in(self.call):
            versions |= grad_versions(variables, grads, copied)
        if versions:
            self.refuse_modified(outputs, variables, versions)
        return grads if self.call.create_graph else owned(grads, variables)

    def refuse_modified(
        self, outputs: Sequence[Tensor], variables: list[Tensor], versions: Mapping[int, int]
    ) -> None:
        """Raise if a gradient that has this version, by the variable's number, was written on."""

        def where() -> str:
            return ", ".join(map(self.call.losses.path, self.call.differentiated[:3]))

        path = self.params_of(variables).path
        refuse_modified(where, path, variables, Subgraph(outputs), versions)

    def _captured_grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        copied: list[Tensor],
        *,
        retain: bool,
    ) -> tuple[list[Tensor | None], dict[int, int]]:
        """Run a pass that also captures what is observed, and that leaves every `.grad` alone."""
        # Returns the gradients, and the versions that those that were copied late had by then.
        with undo_stack() as stack:
            inputs = stack.enter_context(self.observed_inputs(variables))
            create = self.call.create_graph
            monitor = step_monitor()
            finder = None if monitor is None else WriteFinder()
            capture = ArrivalCapture(variables, copied, stack, create_graph=create, finder=finder)
            roots, cotangents = [*outputs, *capture.roots], [*seeds, *(None for _ in capture.roots)]
            inputs += capture.leaves
            if finder is not None and user_code_may_run_in(self.call):
                nodes = self.call.graph.below(self.call.differentiated).nodes
                stack.enter_context(without_shared_memory(nodes, finder.note_copy))
                cotangents = [None if seed is None else seed.clone() for seed in cotangents]
            with finder or nullcontext(), INSIDE:
                grads = run_grad(self.call, roots, inputs, cotangents, retain_graph=retain)
            if finder is not None:
                finder.report(self.params_of(variables))
            if monitor is not None:
                monitor.note(variables, grads[: len(variables)])
            return capture.replace(grads[: len(variables)]), capture.versions

    @contextmanager
    def observed_inputs(self, variables: list[Tensor]) -> Iterator[list[Any]]:
        """Yield what a pass is for, observed tensors too; every `.grad` is put back afterwards."""
        extra = observed_tensors()
        retained = self.retained((*variables, *(tensor for tensor, _ in extra)))
        with grads_put_back(list({id(t): t for t in retained}.values())):
            yield [*variables, *(edge for _, edge in extra)]

    def params_of(self, variables: list[Tensor]) -> Params:
        """Return the params whose variables these are."""
        for one in self.call.passes:
            if one.params.variables is variables:
                return one.params
        raise AssertionError("the variables are not those of a pass of the call")

    def look_for_hooks(self, variables: list[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the variables whose gradients a pass copies on arrival; whether it is unhooked."""
        # That is, copies none, and writes no `.grad`. Looked for once a call.
        if not self._copied_variables:
            every, retained = self.call.params, self.retained()
            for params, copied in zip(every, variables_to_copy(self.call, every), strict=True):
                writes = retained or (not params.only_leaves and self.retained(params.variables))
                self._copied_variables[id(params.variables)] = copied, not copied and not writes
        return self._copied_variables[id(variables)]

    def retained(self, tensors: Iterable[Tensor] = ()) -> list[Tensor]:
        """Return the non-leaf tensors whose `.grad` a pass writes: retain_grad() was called."""
        # Of those given, and of the losses and weights [D4].
        every = (*self.call.losses.leaves, *self.weights, *tensors)
        return [tensor for tensor in every if tensor.retains_grad and not tensor.is_leaf]

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of a vmapped pass, which keeps the graph; they may share memory."""
        # From seeds of shape `[B, *output.shape]` to gradients of shape `[B, *variable.shape]`.
        if not self.call.no_subclasses:
            return run_grad(
                self.call, [output], variables, [seeds], retain_graph=True, is_grads_batched=True
            )
        with batched_mode() as level, hooks_refused():
            grads = run_batch(self.call, [output], variables, [as_batch(seeds, level)])
            with without_function_modes(), INSIDE:
                size = len(seeds)
                return [None if grad is None else from_batch(grad, level, size) for grad in grads]

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
