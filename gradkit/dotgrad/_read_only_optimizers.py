"""Optimizers that only read gradients: a step sets `.grad` to the caller's own, not to copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import methodcaller
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from gradkit._compat.modules import has_step_hooks, is_step_of_class
from gradkit._core.ownership import are_alone_in_memory
from gradkit._core.pytree import PyTree
from gradkit.errors import warn_fallback

# tests/dotgrad/test_read_only_optimizers.py runs each with the options for which nothing is copied.
# One that is not here is given copies: it may write on its gradients, or keep them.
_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
READERS = frozenset(getattr(optim, name) for name in _NAMES if hasattr(optim, name))
_values: Callable[[dict[str, Any]], Iterable[Any]] = methodcaller("values")
_is_contiguous: Callable[[Tensor], bool] = Tensor.is_contiguous
_stride: Callable[[Tensor], tuple[int, ...]] = Tensor.stride


def only_reads(optimizer: Any) -> bool:
    """Return whether a step leaves the gradients as they are, and keeps none of them."""
    return (
        type(optimizer) in READERS
        and is_step_of_class(optimizer)
        and not has_step_hooks(optimizer)  # a hook may clip in place
        and not any(map(_writes, optimizer.param_groups))
    )


def _writes(group: dict[str, Any]) -> bool:
    """Return whether a step with these options writes on gradients, or was not tried for it."""
    if group.get("differentiable") or group.get("capturable"):
        return True
    # SGD adds Nesterov's momentum to the gradient itself where it takes all parameters at once.
    if not group.get("nesterov") or group.get("foreach") is False:
        return False
    return bool(group.get("foreach")) or any(p.device.type != "cpu" for p in group["params"])


def are_laid_out(leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether each gradient has the strides of its leaf."""
    try:
        if all(map(_is_contiguous, grads)) and all(map(_is_contiguous, leaves)):
            return True
        return list(map(_stride, grads)) == list(map(_stride, leaves))
    except (RuntimeError, TypeError):  # sparse, say
        return False


def are_apart_from_state(
    grads: list[Tensor],
    optimizer: Optimizer,
    own_params: Sequence[Tensor],
    tree: PyTree | None,
    *,
    lists: int,
) -> bool:
    """Return whether no gradient shares memory with what a step of the optimizer writes on."""
    # `tree`: the list, tuple or dictionary that alone, beside so many `lists`, this one among them,
    # holds each; or None.
    try:
        if not are_alone_in_memory(grads):
            return False  # it may be a view of a parameter
    except (RuntimeError, TypeError):
        return False
    states = optimizer.state.values()
    # What is a state of the optimizer, too, is in its dictionary, a parameter in its group: another
    # that holds it, but where that dictionary is the tree.
    if (
        tree is not None
        and {_IN_TREE + lists}.issuperset(map(getrefcount, grads))
        and id(tree) not in map(id, states)
    ):
        return True
    written = chain(own_params, chain.from_iterable(map(_values, states)))
    return set(map(id, grads)).isdisjoint(map(id, written))


_one = [torch.empty(0)]
_IN_TREE = next(map(getrefcount, _one))  # the count of a tensor that one container refers to
del _one


def warn_of_write(optimizer: Optimizer) -> None:
    """Warn that a step has changed a gradient of the caller's."""
    warn_fallback(
        f"{type(optimizer).__name__} has changed the gradients that step_ was given, and that "
        "gradkit takes for read-only. The step itself is right. Pass copies: "
        "gradkit.tree.map(torch.clone, grads)"
    )
