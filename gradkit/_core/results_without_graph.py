"""Results whose derivative is known without their graph: it is zero, or torch would get it wrong.

A gradient that does not depend on what it was computed from, that of a linear function, has no
graph; torch's engine, and the transforms of torch.func, cannot tell it from one that was detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.autograd import current_pass, run_around_backward
from gradkit._compat.transforms import is_of_ended_transform, layers, recording_levels, transforms
from gradkit._core.graph import PRIVATE, Subgraph, metadata
from gradkit._core.known_results import attach
from gradkit._core.params import Grads
from gradkit._core.user_code import Cotangents, functions_alive, register_own_hooks, user_functions


def with_zero_derivatives(grads: Iterable[Tensor | None], sources: Iterable[Tensor]) -> Grads:
    """Return gradients with the graphs of all that they were computed from."""
    # A gradient without such a graph has a derivative of zero there.
    graphs = [(source, recording_levels(source)) for source in sources]
    every = set().union(*(levels for _, levels in graphs))
    carriers = [source for source, levels in graphs if levels]
    before = list(grads)
    after = [_with_graphs(grad, every, carriers) for grad in before]
    if functions_alive().users and any(map(is_not, after, before)):
        recorded = [layer for one in carriers for layer in layers(one) if layer.grad_fn is not None]
        _skip_functions_without_cotangents(Subgraph(recorded))
    return after


def _with_graphs(grad: Tensor | None, every: set[int], carriers: list[Tensor]) -> Tensor | None:
    # Sparse ones stay constants: torch has no derivative of most of their operations.
    if grad is None or grad.layout != torch.strided or recording_levels(grad) >= every:
        return grad
    return attach(grad, carriers)


def with_refused_derivatives(
    grads: Iterable[Tensor | None], sources: Iterable[Tensor], reason: str
) -> Grads:
    """Return gradients whose derivative, outside of transforms, raises `UnsupportedGraphError`."""
    carriers = [source for source in sources if recording_levels(source)]
    return [None if grad is None else attach(grad, carriers, reason) for grad in grads]


def without_ended_graph(grad: Tensor | None) -> Tensor | None:
    """Return a gradient without a graph that leads to tensors of ended transforms only."""
    # torch.func leaves one to second derivatives of batch_norm and instance_norm since torch 2.14.
    # A pull of eager code leaves one to its own variables, where a transform differentiates it.
    if grad is None or not grad.requires_grad or transforms():
        return grad
    leaves = Subgraph([grad]).leaves.values()
    is_ended = all(is_of_ended_transform(leaf) or hasattr(leaf, PRIVATE) for leaf in leaves)
    return grad.detach() if leaves and is_ended else grad


def _skip_functions_without_cotangents(below: Subgraph) -> None:
    """Let a pass that brings a Function of the user's no cotangent leave out its backward."""
    # torch calls it even so: with None for all, or with zeros, of which it may make nan.
    kinds = set(user_functions(below.kinds))
    for node in below.nodes if kinds else ():
        if type(node) in kinds and _GUARDED not in metadata(node):
            metadata(node)[_GUARDED] = True
            _skip_empty_passes(node)


_GUARDED = "gradkit runs no backward without cotangents"


def _skip_empty_passes(function: Any) -> None:
    """Run the backward of a Function's node only in passes in which a cotangent arrives."""
    count = len(function.needs_input_grad)
    empty: set[int] = set()

    def before(cotangents: Cotangents) -> None:  # after hooks, torch may make zeros of them
        if all(cotangent is None for cotangent in cotangents):
            empty.add(current_pass())

    def backward(run: Callable[..., Any], *cotangents: Tensor | None) -> Any:
        if current_pass() not in empty:
            return run(*cotangents)
        empty.discard(current_pass())
        return (None,) * count

    register_own_hooks(partial(function.register_prehook, before))
    run_around_backward(function, backward)
