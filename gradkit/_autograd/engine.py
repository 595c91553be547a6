"""The one caller of torch's engine: a pass, and whose its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradkit._core import graph, hooks, saved_tensors
from gradkit._core.ownership import copy_for, own
from gradkit.errors import FreedGraphError, UnsupportedGraphError, message

_MULTI_GRAD_HOOK = message(
    "params",
    "leaf tensors without register_multi_grad_hook",
    "one that has it: torch runs such hooks of leaves in backward() only",
    "remove the hook for this call, register it on non-leaf tensors, or use backward_",
)


class Watcher(Protocol):
    """Something that wants the gradient of further tensors from every pass in this thread."""

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and where their gradients arrive, or raise to stop the pass."""


class _Watchers(local):
    def __init__(self) -> None:
        self.active: list[Watcher] = []


_watchers = _Watchers()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` take part in every pass of this thread inside the block."""
    _watchers.active.append(watcher)
    try:
        yield
    finally:
        _watchers.active.remove(watcher)


def watched() -> list[tuple[Tensor, GradientEdge]]:
    """Return the tensors that take part in every pass of this thread, or raise to stop the pass."""
    return [pair for watcher in _watchers.active for pair in watcher.before_pass()]


@dataclass(frozen=True, slots=True)
class Run:
    """How the passes of one call are run.

    Attributes:
        losses: All losses of the call.
        name: Gives the path of a loss, for errors.
        weights: Weights that are part of the graph.
        create_graph: Let the gradients carry a graph.
        guard: A hook, or a custom Function of the user's in the graph, could write on a gradient
            that the engine has already captured: copy each one as it arrives.
        ordinary: All variables are plain leaf tensors.
    """

    losses: Sequence[Tensor]
    name: Callable[[int], str]
    weights: Sequence[Tensor] = ()
    create_graph: bool = False
    guard: bool = False
    ordinary: bool = True

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Run one engine pass.

        Args:
            outputs: Where it starts.
            seeds: The cotangent of each output, of its shape; None is one.
            variables: The tensors whose gradient is wanted, each once.
            retain: Keep the graph.

        Returns:
            For each variable its gradient, owned unless it carries a graph, or None.

        Raises:
            FreedGraphError: The graph has been freed before.
        """
        if self.ordinary and not (self.guard or _watchers.active or self._keeps_grads):
            grads = list(self._run(outputs, variables, seeds, retain_graph=retain))
        else:
            grads = self._grads_with_care(outputs, seeds, variables, retain=retain)
        return grads if self.create_graph else _owned(grads, variables)

    def _grads_with_care(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        further = watched()
        inputs: list[Any] = [*variables, *(edge for _, edge in further)]
        with ExitStack() as stack:
            self._put_grads_back(variables, [tensor for tensor, _ in further], stack)
            if self.ordinary and not self.guard:
                found = self._run(outputs, inputs, seeds, retain_graph=retain)
                return list(found[: len(variables)])
            catch = _Catch(variables, stack, self)
            roots, cotangents = [*outputs, catch.root], [*seeds, None]
            found = self._run(roots, [*inputs, catch.leaf], cotangents, retain_graph=retain)
            return catch.replace(list(found[: len(variables)]))

    def grads_of_batch(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Run one vmapped pass, and keep the graph.

        Args:
            output: Where it starts.
            seeds: A batch of cotangents, of shape `[B, *output.shape]`.
            variables: Leaf tensors whose gradient is wanted, each once.

        Returns:
            For each variable its gradients, of shape `[B, *variable.shape]`, or None. They may
            share memory.

        Raises:
            FreedGraphError: The graph has been freed before.
        """
        return list(
            self._run([output], variables, [seeds], retain_graph=True, is_grads_batched=True)
        )

    def backward(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor] | None,
        *,
        retain: bool,
    ) -> None:
        """Run one pass that accumulates into `.grad`.

        Args:
            outputs: Where it starts.
            seeds: The cotangent of each output, of its shape; None is one.
            variables: The tensors whose `.grad` is written; None is all leaves.
            retain: Keep the graph.

        Raises:
            FreedGraphError: The graph has been freed before.
            RuntimeError: The engine's own error, if it has no name here.
        """
        try:
            torch.autograd.backward(
                outputs,
                seeds,
                retain_graph=retain,
                create_graph=self.create_graph,
                inputs=variables,
            )
        except RuntimeError as error:
            self._name(error)
            raise

    def _run(
        self, outputs: Sequence[Tensor], inputs: Any, seeds: Any, **how: bool
    ) -> tuple[Tensor | None, ...]:
        try:
            found = torch.autograd.grad(
                outputs, inputs, seeds, create_graph=self.create_graph, allow_unused=True, **how
            )
        except RuntimeError as error:
            self._name(error)
            raise
        return cast("tuple[Tensor | None, ...]", found)

    def _name(self, error: RuntimeError) -> None:
        """Raise what the engine's error is called here, if it has a name."""
        if "through the graph a second time" in str(error):
            raise FreedGraphError(self.freed()) from error
        if "_will_engine_execute_node" in str(error):
            raise UnsupportedGraphError(_MULTI_GRAD_HOOK) from error
        if "modified by an inplace operation" in str(error):
            raise UnsupportedGraphError(self._modified(error)) from error

    def _modified(self, error: RuntimeError) -> str:
        return message(
            ", ".join(map(self.name, range(min(3, len(self.losses))))),
            "a graph whose saved tensors are as they were in the forward pass",
            f"one that has changed since: {str(error).partition(' Hint')[0].rstrip('.')}",
            "take the gradients before the optimizer's step, or change a copy",
        )

    @property
    def _keeps_grads(self) -> bool:
        return any(tensor.retains_grad for tensor in (*self.losses, *self.weights))

    def _put_grads_back(
        self, variables: list[Tensor], further: list[Tensor], stack: ExitStack
    ) -> None:
        """Put back, afterwards, the `.grad` of tensors that the user called retain_grad() on."""
        for tensor in {
            id(t): t for t in (*self.losses, *self.weights, *variables, *further)
        }.values():
            if tensor.retains_grad and not tensor.is_leaf:
                stack.enter_context(_grad_kept(tensor))

    def freed(self, indices: Sequence[int] = ()) -> str:
        """Return the message for a second pass through a graph.

        Args:
            indices: The losses whose graph is freed; if none are given, they are looked for.

        Returns:
            The text of a `FreedGraphError`.
        """
        found = indices or [
            index
            for index, loss in enumerate(self.losses)
            if loss.requires_grad
            and any(map(saved_tensors.has_released, graph.nodes_below([loss])))
        ]
        return message(
            ", ".join(map(self.name, found or range(len(self.losses)))),
            "a graph that still holds its saved tensors",
            "one that an earlier backward() or gradkit call has freed",
            "ask for all gradients in one call, gradkit.per_loss_grads({'a': loss_a, 'b': loss_b}, "
            "params), or pass retain_graph=True to the earlier call",
        )


class _Catch:
    """Copies gradients as they arrive, where the engine's own capture could be another value.

    For a non-leaf, the engine captures before the tensor's hooks if the pass goes on below it, and
    hands the captured tensor to the node below, which may write on it [D3, L3]; on what it has
    captured for a leaf, a custom Function that was given the same tensor may write. A hook that is
    registered last sees what the user's hooks leave.

    A leaf's gradient is replaced by a copy as soon as it arrives, when `AccumulateGrad` takes it.

    Other threads, and passes inside of hooks, go through the same tensors: each gradient is kept
    by the number of its pass, and a root of our own tells which one is ours.
    """

    def __init__(self, variables: list[Tensor], stack: ExitStack, run: Run) -> None:
        self._pass: list[int] = []
        self._arrived: dict[int, dict[int, Tensor]] = {}
        self._create_graph = run.create_graph
        for index, variable in enumerate(variables):
            if variable.grad_fn is not None:
                self._arrived[index] = {}
                self._listen(variable, partial(self._take, index, variable), stack)
        if run.guard:
            stack.enter_context(_copied_on_arrival([v for v in variables if v.grad_fn is None]))
        with torch.enable_grad():
            self.leaf = torch.zeros((), device=variables[0].device, requires_grad=True)
            self.root = self.leaf.view_as(self.leaf)
        self._listen(self.root, lambda _: self._pass.append(_pass_number()), stack)

    @staticmethod
    def _listen(tensor: Tensor, hook: Callable[[Tensor], Tensor | None], stack: ExitStack) -> None:
        stack.callback(hooks.listen(tensor, hook).remove)

    def _take(self, index: int, variable: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            copy = copy_for(grad if self._create_graph else grad.detach(), variable)
            self._arrived[index][_pass_number()] = copy

    def replace(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients with those that have arrived in place of the engine's captures."""
        for index, by_pass in self._arrived.items():
            if self._pass[0] in by_pass:
                grads[index] = by_pass.pop(self._pass[0])
        return grads


@contextmanager
def _copied_on_arrival(leaves: list[Tensor]) -> Iterator[None]:
    """Let the engine capture a copy of each leaf's gradient, as soon as it arrives."""
    # Into the tables of hooks themselves: a handle for each would take longer than the copy.
    tables = list(map(hooks.hooks_of, leaves))
    ours = object()
    try:
        for table in tables:
            table[ours] = _copied
        yield
    finally:
        for table in tables:
            table.pop(ours, None)


def _copied(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()  # None is an undefined gradient [D10]


def _pass_number() -> int:
    return torch._C._current_graph_task_id()


def _owned(grads: list[Tensor | None], variables: list[Tensor]) -> list[Tensor | None]:
    present = [index for index, grad in enumerate(grads) if grad is not None]
    if len(present) == len(grads):
        own(cast("list[Tensor]", grads), variables)
        return grads
    found = [grad for grad in grads if grad is not None]
    grads.clear()  # `own` looks for further references
    own(found, [variables[index] for index in present])
    ours = dict(zip(present, found, strict=True))
    return [ours.get(index) for index in range(len(variables))]


@contextmanager
def _grad_kept(tensor: Tensor) -> Iterator[None]:
    """Put back the `.grad` of a tensor that the user has called retain_grad() on [D4]."""
    before = tensor.grad
    tensor.grad = None
    try:
        yield
    finally:
        tensor.grad = before
