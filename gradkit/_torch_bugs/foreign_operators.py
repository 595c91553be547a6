"""Operators that torch itself does not define, which may drop the derivative of an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._compat.autograd import written_arguments
from gradkit._compat.transforms import (
    carries_graph,
    carries_tangent,
    layers,
    tangent_version,
    transforms,
    varies,
)
from gradkit._core import pytree
from gradkit.errors import UnsupportedGraphError, message

# An operator called as torch.ops.aten.add, or with its overload.
OPERATOR, OVERLOAD = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)
_OF_TORCH = frozenset({"aten", "prim", "prims"})
_WITHOUT_DERIVATIVE = "torch::autograd::WarnNotImplemented"


def is_foreign(func: Callable[..., Any]) -> bool:
    """Return whether this is an operator that torch itself does not define."""
    is_operator = isinstance(func, (OPERATOR, OVERLOAD))
    return is_operator and str(func).partition(".")[0] not in _OF_TORCH


# A tensor, what made it, and how often its tangent was written on.
Written: TypeAlias = list[tuple[Tensor, Any, int | None]]


def graphs_written_on(func: Any, args: Any, kwargs: Any) -> Written:
    """Return what an operator writes on, as its schemas say, if that has a graph, or a tangent."""
    # A leaf of eager code is the variable itself, whatever was written on it.
    varying = [
        x
        for x in pytree.tensors(written_arguments(func, args, kwargs))
        if varies(x) and (transforms() or not x.is_leaf)
    ]
    return [(x, x.grad_fn, tangent_version(x)) for x in varying]


def constants_written_on(func: Any, args: Any, kwargs: Any) -> Written:
    """Return the constants that an operator writes on, if it is given what has a graph."""
    # The operator may be one of statistics; x.detach(), which the error names, is right for those.
    constants = [x for x in pytree.tensors(written_arguments(func, args, kwargs)) if not varies(x)]
    is_given = constants and any(map(carries_graph, pytree.tensors((args, kwargs))))
    return [(x, None, None) for x in constants] if is_given else []


def refuse_dropped(func: Callable[..., Any], given: Any, result: Any, written: Written) -> None:
    """Raise if an operator has dropped a derivative of what it was given."""
    # torch drops tangents without a word, and warns once of a backward pass.
    outputs = [x for x in pytree.tensors(result) if x.is_floating_point() or x.is_complex()]
    inputs = pytree.tensors(given) if outputs else []
    nodes = [layer.grad_fn for output in outputs for layer in layers(output)]
    is_cut = any(node is not None and node.name() == _WITHOUT_DERIVATIVE for node in nodes)
    if torch.is_grad_enabled() and not any(map(carries_graph, outputs)):  # a kernel falls through
        is_cut |= any(map(carries_graph, inputs))
    if any(x.grad_fn is made and tangent_version(x) == count for x, made, count in written):
        got = "one that writes on a tensor with a graph or a tangent, which stay as they were"
        fix = "return the result, with torch.library.register_autograd, and write on nothing"
    elif is_cut:
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
