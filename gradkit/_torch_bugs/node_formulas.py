"""Formulas by which the gradients of nodes are differentiated, where torch is wrong or cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from gradkit._compat.checkpoints import offer_again, recomputed_tensors
from gradkit._compat.nodes import saved, saved_ints, saved_or
from gradkit._compat.transforms import transforms
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core.graph import Subgraph
from gradkit._core.known_results import Result, merged, rule_of
from gradkit._core.user_code import Cotangents, hooks_registered, register_own_hooks, remove_hooks
from gradkit._torch_bugs.attention import attention
from gradkit._torch_bugs.formulas import logcumsumexp, weight_norm
from gradkit.errors import UnsupportedGraphError, message

Formula: TypeAlias = Callable[..., Tensor]
# A formula, and the tensors that it is of: first those that the node's gradients belong to.
OfNode: TypeAlias = tuple[Formula, list[Tensor]]


def _attention_of(node: Any) -> OfNode:
    mask = saved_or(None, node, "attn_mask", "attn_bias")
    options = {name: saved(node, name) for name in ("is_causal", "scale")}
    formula = partial(attention, **options, enable_gqa=True)
    inputs = [saved(node, name) for name in ("query", "key", "value")]
    return formula, inputs if mask is None else [*inputs, mask]


_FUSED_ATTENTION = (
    "FlashAttention", "FlashAttentionForCpu", "EfficientAttention", "CudnnAttention",
    "FusedAttentionOverrideable",
)  # fmt: skip
# The keys are kinds of nodes.
NODE_FORMULAS: dict[str, Callable[[Any], OfNode]] = {
    **{f"ScaledDotProduct{kernel}Backward0": _attention_of for kernel in _FUSED_ATTENTION},
    "WeightNormInterfaceBackward0": lambda node: (
        partial(weight_norm, None, dim=saved(node, "dim")), [saved(node, "v"), saved(node, "g")]),
    "LogcumsumexpBackward0": lambda node: (
        partial(logcumsumexp, None, dim=saved_ints(node, "dim")[0]), [saved(node, "self")]),
    "HardsigmoidBackward0": lambda node: (
        lambda x: functional.relu6(x + 3) / 6, [saved(node, "self")]),
}  # fmt: skip


def has_formula(node: Any) -> bool:
    """Return whether the result of a node is that of a formula, which draws nothing at random."""
    return type(node).__name__ in NODE_FORMULAS and not saved_or(0, node, "dropout_p")


def holds_formulas(below: Subgraph) -> bool:
    """Return whether a graph may hold nodes that have a formula."""
    return not NODE_FORMULAS.keys().isdisjoint(kind.__name__ for kind in below.kinds)


@contextmanager
def differentiated_by_formula(below: Subgraph) -> Iterator[None]:
    """Let the gradients of a pass with create_graph be differentiated by the formulas of nodes."""
    handles: list[RemovableHandle] = []
    with undone(partial(remove_hooks, handles)):
        for node in filter(has_formula, below.nodes if holds_formulas(below) else ()):
            one = _ByFormula(node)
            handles += register_own_hooks(
                partial(node.register_prehook, one.before), partial(node.register_hook, one.after)
            )
        yield


class _ByFormula:
    """Hooks of a node, whose gradients get the derivative of its formula."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._recomputed: list[Any] = []
        self._of_node: OfNode | None = None  # read in advance

    def before(self, _: Cotangents) -> None:
        """Read what a checkpoint recomputes for the node, and let the node read it, too."""
        self._recomputed = recomputed_tensors(self._node) if torch.is_grad_enabled() else []
        if self._recomputed:
            offer_again(self._recomputed)
            self._of_node = NODE_FORMULAS[type(self._node).__name__](self._node)
            offer_again(self._recomputed)

    def after(self, grads: Cotangents, cotangents: Cotangents) -> Cotangents | None:
        """Return the gradients that a node has made, with the derivative of its formula."""
        cotangent, *_ = cotangents
        if cotangent is None or not torch.is_grad_enabled():  # a pass in another thread
            return None
        of_node, self._of_node = self._of_node, None
        if hooks_registered() and not transforms():
            offer_again(self._recomputed)
            _refuse_changed(self._node, grads, cotangent)
        self._recomputed = []
        formula, inputs = of_node or NODE_FORMULAS[type(self._node).__name__](self._node)
        are_made = [grad is not None for grad in grads]
        # Detached: torch's own derivative of them raises, even where nothing flows into it.
        present = [grad.detach() for grad in grads if grad is not None]

        def by_formula(cotangent: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(compress(vjp(formula, *inputs)[1](cotangent), are_made))

        made = Result.of(rule_of(by_formula), [cotangent, *inputs], present)
        return tuple(merged(grads, are_made, made))


def _refuse_changed(node: Any, grads: Cotangents, cotangent: Tensor) -> None:
    """Raise if a hook of the user's on a node has changed its gradients: no formula has that."""
    made = node(cotangent)  # needs a graph: without one, torch takes another kernel for some
    with torch.no_grad(), INSIDE:
        for ours, grad in zip(made if isinstance(made, tuple) else (made,), grads, strict=True):
            if (ours is None) is not (grad is None) or (
                ours is not None and not torch.allclose(ours, grad, equal_nan=True)  # type: ignore[arg-type]
            ):
                name = type(node).__name__
                expected, got = "the gradients that torch makes there", "those that a hook returns"
                fix = f"register the hook on a tensor, and not on {name}; or leave out create_graph"
                raise UnsupportedGraphError(message(f"a hook on {name}", expected, got, fix))
