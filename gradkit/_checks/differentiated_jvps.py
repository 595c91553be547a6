"""The jvp of a user's Function, differentiated as the code that it is.

torch switches forward mode off while it runs one, and a jvp around it loses its own tangents there:
https://github.com/pytorch/pytorch/issues/197867.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import (
    FORWARD,
    apply_function,
    differentiated_around,
    forward_mode_on,
    recording_levels,
    transforms,
    without_innermost_tangent,
)
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree


def function_with_differentiated_jvp(args: Sequence[Any]) -> Any:
    """Return a Function, the first argument, whose jvp is differentiated where others need that."""
    function, *given = args
    stack = transforms()
    if function in _made or FORWARD not in stack:
        return function
    is_differentiated = differentiated_around(stack, FORWARD) or any(
        isinstance(x, Tensor) and 0 in recording_levels(x) for x in given
    )
    return _made_differentiable(function) if is_differentiated else function


class DifferentiatedJvps(TorchFunctionMode):
    """Sees the Functions that others call: in a jvp, a backward, a rule for vmap."""

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func is apply_function:
            args = function_with_differentiated_jvp(args), *args[1:]
        return func(*args, **kwargs or {})


_made: WeakSet[Any] = WeakSet()


def _made_differentiable(function: Any) -> Any:
    """Return a Function that does the same, with forward mode on where torch switches it off."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The tangents of the level whose jvp is about to run are no part of what that computes.
        given: dict[int, Any] = {}

        def primal(tensor: Tensor) -> Tensor:
            result = without_innermost_tangent(tensor)
            given[id(result)] = tensor
            return result

        mark_dirty: Any = WeakMethod(ctx.mark_dirty)  # its node would else refer to itself
        ctx.mark_dirty = lambda *xs: mark_dirty()(*[given.get(id(x), x) for x in xs])
        with torch.enable_grad(), forward_mode_on(), DifferentiatedJvps(), INSIDE:
            function.setup_context(ctx, pytree.map_tensors(primal, inputs), output)
        given.clear()

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_mode_on(), DifferentiatedJvps(), INSIDE:
            return function.jvp(ctx, *tangents)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with DifferentiatedJvps(), INSIDE:
                return method(*args)

        return call

    methods = {"setup_context": setup_context, "jvp": jvp, "backward": watched(function.backward)}
    if function.vmap is not Function.vmap:
        methods["vmap"] = watched(function.vmap)
    members: dict[str, Any] = {name: staticmethod(method) for name, method in methods.items()}
    members["__module__"] = function.__module__  # of the user's, as its nodes are
    made = type(function)(function.__name__, (function,), members)
    _made.add(made)
    return made
