"""Operators of libraries, torch.ops.library.name: torch drops derivatives that they do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import carries_graph, carries_tangent, layers
from gradkit._core import pytree
from gradkit.errors import UnsupportedGraphError, message

# An operator called as torch.ops.aten.add, or with its overload.
OPERATOR, OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_WITH_DERIVATIVES = frozenset({"aten", "prim", "prims"})
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"


def is_foreign(func: Callable[..., Any]) -> bool:
    """Return whether this is an operator that torch itself does not define."""
    return isinstance(func, (OPERATOR, OVERLOAD)) and _library(func) not in _WITH_DERIVATIVES


def _library(func: Callable[..., Any]) -> str:
    return str(func).partition(".")[0]


def refuse_dropped(func: Callable[..., Any], given: Any, result: Any) -> None:
    """Raise if an operator has dropped a derivative of what it was given."""
    # torch drops tangents without a word, and warns once of a backward pass.
    outputs = [x for x in pytree.tensors(result) if x.is_floating_point() or x.is_complex()]
    if not outputs:
        return
    inputs = pytree.tensors(given)
    if any(map(_ends_backward_passes, outputs)) or _lose_graph(inputs, outputs):
        got = "one without an autograd kernel: torch takes its derivative as zero"
        fix = "torch.library.register_autograd, or an Autograd kernel in C++"
    elif any(map(carries_tangent, inputs)) and not any(map(carries_tangent, outputs)):
        got = "one without a formula for forward mode: torch drops the tangent"
        fix = "reverse mode: gradkit.value_and_grads(losses, params)"
    else:
        return
    where, expected = f"torch.ops.{func}", "an operator whose derivative torch has"
    fix += "; or, if the result is meant as a constant, give the operator x.detach()"
    raise UnsupportedGraphError(message(where, expected, got, fix))


def _lose_graph(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Return whether nothing is recorded: an autograd kernel falls through."""
    if not torch.is_grad_enabled() or any(map(carries_graph, outputs)):
        return False
    return any(map(carries_graph, inputs))


def _ends_backward_passes(output: Tensor) -> bool:
    nodes = (layer.grad_fn for layer in layers(output))
    return any(node is not None and node.name() == _WITHOUT_DERIVATIVE for node in nodes)
