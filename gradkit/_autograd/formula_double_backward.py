"""Gives the gradients of a pass the derivative that torch gets wrong, or does not have.

Fused attention has a first derivative and no second. Its gradients stay those of the kernel; where
they are differentiated, so is the formula. What is not differentiated again costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp
from torch.utils.hooks import RemovableHandle

from gradkit._checks.differentiable_formulas import NODE_FORMULAS, Formula, has_formula
from gradkit._compat.transforms import without_default_hooks
from gradkit._compat.undoing import undone
from gradkit._core.graph import Subgraph
from gradkit._core.user_code import Cotangents, register_own_hooks_around_node, remove_hooks


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
                handles += register_own_hooks_around_node(node, lambda _: None, _FormulaHook(node))
        yield


class _FormulaHook:
    """A hook that runs after a node: it gives the node's gradients another derivative."""

    def __init__(self, node: Any) -> None:
        self._read, self._node = NODE_FORMULAS[type(node).__name__], node

    def __call__(self, grads: Cotangents, cotangents: Cotangents) -> Cotangents | None:
        """Return the gradients, with the derivative of the formula."""
        cotangent, *_ = cotangents
        if cotangent is None or not torch.is_grad_enabled():  # a pass in another thread
            return None
        formula, inputs = self._read(self._node)
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
