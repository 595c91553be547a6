"""Derivatives of a pass's gradients: by a formula where torch has none, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node
from torch.func import vjp
from torch.utils.hooks import RemovableHandle

from gradkit._checks.differentiable_formulas import NODE_FORMULAS, Formula, has_formula
from gradkit._checks.higher_derivatives import undifferentiable_message
from gradkit._compat.autograd import current_pass, sequence_number
from gradkit._compat.transforms import (
    clone_with_node,
    is_transform_tensor,
    layers,
    unbatched,
    without_default_hooks,
)
from gradkit._compat.undoing import undone
from gradkit._core.graph import Subgraph, leaf_tensors, nodes_below
from gradkit._core.user_code import Cotangents, register_own_hooks, remove_hooks, user_functions
from gradkit.errors import UnsupportedGraphError


@contextmanager
def refuse_undifferentiable(where: Callable[[], str], below: Subgraph) -> Iterator[None]:
    """Raise from a pass with a graph if a Function's gradients have no path to its cotangent."""
    # Such a gradient, or derivative of one, would be taken for a constant, and what remains of the
    # derivative would be returned. It is what once_differentiable, no_grad, detach() and a kernel
    # that autograd does not know do, in whatever they are wrapped.
    kinds = set(user_functions(below.kinds))
    handles: list[RemovableHandle] = []
    with undone(partial(remove_hooks, handles)):
        for node in below.nodes if kinds else ():
            if type(node) in kinds:
                probe = _Probe(where, type(node), below)
                handles += register_own_hooks(
                    partial(node.register_prehook, probe.before),
                    partial(node.register_hook, probe.after),
                )
        yield


class _CopiedCotangent(NamedTuple):
    """What made a cotangent that a Function gets, and the leaf below it if that is no one's."""

    node: Node
    leaf: Tensor | None


class _Probe:
    """Hooks of a Function's node: it gets cotangents that only its own gradients can lead to."""

    def __init__(self, where: Callable[[], str], kind: type, graph: Subgraph) -> None:
        self._where, self._kind, self._graph = where, kind, graph
        self._copies: dict[int, list[_CopiedCotangent]] = {}  # by the number of the pass

    def before(self, cotangents: Cotangents) -> Cotangents | None:
        """Return copies of the cotangents, each with a node that made it."""
        if not torch.is_grad_enabled():  # a pass in another thread
            return None
        copies = self._copies[current_pass()] = []
        return tuple(_with_own_node(cotangent, copies) for cotangent in cotangents)

    def after(self, grads: Cotangents, _: Cotangents) -> Cotangents | None:
        """Raise if no gradient leads to a cotangent; detach those that lead to nothing else."""
        copies = self._copies.pop(current_pass(), [])
        if not copies:
            return None
        oldest = min(sequence_number(copy.node) for copy in copies)
        present = [unbatched(grad) for grad in grads if grad is not None]
        if self._new_nodes(present, oldest).isdisjoint(copy.node for copy in copies):
            if any(map(_is_lost, present)):
                raise UnsupportedGraphError(undifferentiable_message(self._where(), self._kind))
            return None
        leaves = [copy.leaf for copy in copies if copy.leaf is not None]
        for leaf in leaves:
            leaf.requires_grad_(False)  # no later pass accumulates there
        if not leaves:
            return None
        return tuple(
            grad.detach() if grad is not None and self._is_constant(grad, oldest) else grad
            for grad in grads
        )

    def _new_nodes(self, grads: list[Tensor], oldest: int) -> set[Node]:
        """Return the nodes of gradients that are as new as the cotangents'."""
        roots = [grad for grad in grads if grad.requires_grad]
        return nodes_below(roots, self._graph.nodes, oldest)

    def _is_constant(self, grad: Tensor, oldest: int) -> bool:
        """Return whether a gradient leads to nothing but leaves that are no one's."""
        new = self._new_nodes([grad], oldest)
        ends = {node for one in new for node, _ in one.next_functions if node is not None}
        leads_on = any(leaf.requires_grad for leaf in leaf_tensors(new).values())
        return grad.requires_grad and ends <= new and not leads_on


def _with_own_node(cotangent: Tensor | None, copies: list[_CopiedCotangent]) -> Tensor | None:
    if cotangent is None or not (cotangent.is_floating_point() or cotangent.is_complex()):
        return cotangent
    copy = clone_with_node(cotangent)
    node = unbatched(copy).grad_fn
    if node is not None:
        leaf = None
        if not is_transform_tensor(cotangent) and not cotangent.requires_grad:
            (leaf,) = leaf_tensors(child for child, _ in node.next_functions if child).values()
        copies.append(_CopiedCotangent(node, leaf))
    return copy


def _is_lost(grad: Tensor) -> bool:
    """Return whether no transform further out has recorded a gradient, either."""
    return not any(layer.requires_grad for layer in [*layers(grad)][1:])


def holds_formulas(below: Subgraph) -> bool:
    """Return whether a graph may hold nodes that have a formula."""
    return not NODE_FORMULAS.keys().isdisjoint(kind.__name__ for kind in below.kinds)


@contextmanager
def differentiated_by_formula(below: Subgraph) -> Iterator[None]:
    """Let the gradients of a pass with create_graph be differentiated by the formulas of nodes."""
    handles: list[RemovableHandle] = []
    with undone(partial(remove_hooks, handles)):
        if holds_formulas(below):
            for node in filter(has_formula, below.nodes):
                handles += register_own_hooks(
                    partial(node.register_hook, partial(_by_formula, node))
                )
        yield


def _by_formula(node: Any, grads: Cotangents, cotangents: Cotangents) -> Cotangents | None:
    """Return the gradients that a node has made, with the derivative of its formula."""
    cotangent, *_ = cotangents
    if cotangent is None or not torch.is_grad_enabled():  # a pass in another thread
        return None
    formula, inputs = NODE_FORMULAS[type(node).__name__](node)
    indices = [index for index, grad in enumerate(grads) if grad is not None]
    # Detached: torch's own derivative of them raises, even where nothing flows into it.
    present = [grad.detach() for grad in grads if grad is not None]
    outputs = _ByFormula.apply(formula, indices, cotangent, *inputs, *present)  # type: ignore[no-untyped-call]
    result: list[Tensor | None] = [None] * len(grads)
    for index, output in zip(indices, outputs, strict=True):
        result[index] = output
    return tuple(result)


class _ByFormula(Function):
    """The identity of gradients, whose derivative is that of a formula's gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(formula: Formula, indices: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.clone() for grad in tensors[-len(indices) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.formula, ctx.indices = inputs[:2]
        ctx.save_for_backward(*inputs[2 : -len(output)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        def grads(cotangent: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            every = vjp(ctx.formula, *inputs)[1](cotangent)
            return tuple(every[index] for index in ctx.indices)

        with without_default_hooks():
            pull = vjp(grads, *ctx.saved_tensors)[1]
            pulled = pull(cotangents)
        return None, None, *pulled, *[None] * len(ctx.indices)
