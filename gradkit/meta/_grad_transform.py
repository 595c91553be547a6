"""A function of the caller's on the gradients of a step, before the optimizer gets them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import OptionError, describe, message
from gradkit.meta._optimizer import StateLists, check_grads
from gradkit.meta._trees import InnerParams


@dataclass(frozen=True)
class GradTransform:
    """A function of `(grads)`, or of `(grads, outer, state)`: a learned optimizer."""

    fn: Callable[..., PyTree]
    is_learned: bool

    def __call__(
        self, params: InnerParams, grads: list[Tensor | None], outer: PyTree, state: StateLists
    ) -> list[Any]:
        """Return the changed gradients of the variables."""
        root = "grad_transform(grads)"

        def tree(values: list[Any]) -> PyTree:
            return pytree.unflatten(params.spec, params.per_leaf(values))

        states = {name: tree(column) for name, column in state.items()} if self.is_learned else {}
        more = (outer, states) if self.is_learned else ()
        leaves = pytree.flatten_up_to(params.spec, "params", self.fn(tree(grads), *more), root)
        pairs = zip(params.slots, leaves, strict=True)
        movable = [None if slot is None else leaf for slot, leaf in pairs]
        check_grads(params.leaves, movable, params.spec, root)
        return params.per_variable(movable)


def read_grad_transform(fn: Callable[..., PyTree] | None) -> GradTransform | None:
    """Read how many arguments the function takes, one or three."""
    if fn is None:
        return None
    fits = [count for count in (1, 3) if callable(fn) and _takes(fn, count)]
    if len(fits) != 1:
        got = describe(fn) if not callable(fn) else f"one that takes {_signature(fn)}"
        expected = "a function that takes (grads), or one that takes (grads, outer, state)"
        fix = "grad_transform=lambda grads: fn(grads), or lambda grads, outer, state: ..."
        raise OptionError(message("grad_transform", expected, got, fix))
    return GradTransform(fn, fits == [3])


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with this many arguments."""
    signature = _signature(fn)
    if signature is None:
        return count == 1  # a function of C, such as torch.sign
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:
        return None
