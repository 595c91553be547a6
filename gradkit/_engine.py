"""The one caller of torch.autograd.grad: a pass, what it may keep alive, and whose its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import local
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradkit import _graph
from gradkit._ownership import copy_for, own
from gradkit.errors import FreedGraphError, message


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
        create_graph: Let the gradients carry a graph.
        guard: The graph holds a custom Function of the user's, whose backward could write on a
            gradient that the engine has already captured: copy each one as it arrives.
        ordinary: All variables are plain leaf tensors.
    """

    losses: Sequence[Tensor]
    name: Callable[[int], str]
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
        further = watched()
        with ExitStack() as stack:
            self._keep_grads(variables, [tensor for tensor, _ in further], stack)
            arrived = self._catch(variables, stack) if self.guard or not self.ordinary else {}
            try:
                found = torch.autograd.grad(
                    outputs,
                    [*variables, *(edge for _, edge in further)] if further else variables,
                    seeds,
                    retain_graph=retain,
                    create_graph=self.create_graph,
                    allow_unused=True,
                )
            except RuntimeError as error:
                if "through the graph a second time" in str(error):
                    raise self._freed() from error
                raise
        grads = list(found[: len(variables)])
        del found
        for index, grad in arrived.items():
            grads[index] = grad
        arrived.clear()
        if self.create_graph:
            return grads
        return _owned(grads, variables)

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
        """
        return list(
            torch.autograd.grad(
                output,
                variables,
                seeds,
                retain_graph=True,
                create_graph=self.create_graph,
                allow_unused=True,
                is_grads_batched=True,
            )
        )

    def _keep_grads(
        self, variables: list[Tensor], further: list[Tensor], stack: ExitStack
    ) -> None:
        """Put back, afterwards, the `.grad` of the tensors that the user called retain_grad() on."""
        seen = (*self.losses, *further) if self.ordinary else (*self.losses, *variables, *further)
        for tensor in {id(t): t for t in seen if t.retains_grad and not t.is_leaf}.values():
            stack.enter_context(_grad_kept(tensor))

    def _catch(self, variables: list[Tensor], stack: ExitStack) -> dict[int, Tensor]:
        """Copy gradients as they arrive, where the engine's own capture could be another value.

        For a non-leaf, the engine captures before the tensor's hooks if the pass goes on below it,
        and hands the captured tensor to the node below, which may write on it [D3, L3]. A hook
        registered last sees what the user's hooks leave.
        """
        arrived: dict[int, Tensor] = {}

        def catcher(index: int) -> Callable[[Tensor | None], None]:
            def catch(grad: Tensor | None) -> None:
                if grad is not None:
                    arrived[index] = copy_for(grad, variables[index])

            return catch

        for index, variable in enumerate(variables):
            if self.guard or variable.grad_fn is not None:
                handle = variable.register_hook(catcher(index))
                stack.callback(handle.remove)
        return arrived

    def refuse_freed(self, indices: Sequence[int]) -> None:
        """Raise if one of these losses shows at its root that it has been differentiated before.

        Args:
            indices: The losses to look at.

        Raises:
            FreedGraphError: Its saved tensors are gone.
        """
        for index in indices:
            if _graph.is_freed(self.losses[index]):
                raise self._freed([index])

    def _freed(self, indices: Sequence[int] | None = None) -> FreedGraphError:
        if indices is None:
            indices = [
                index
                for index, loss in enumerate(self.losses)
                if loss.requires_grad and _graph.is_freed_below(loss)
            ]
        names = ", ".join(map(self.name, indices or range(len(self.losses))))
        return FreedGraphError(
            message(
                names,
                "a graph that still holds its saved tensors",
                "one that an earlier backward() or gradkit call has freed",
                "ask for all gradients in one call, gradkit.per_loss_grads({'a': loss_a, "
                "'b': loss_b}, params), or pass retain_graph=True to the earlier call",
            )
        )


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
