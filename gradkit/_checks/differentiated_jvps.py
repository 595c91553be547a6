"""The jvp of a user's Function, differentiated as the code that it is.

torch switches forward mode off while it runs one, and a jvp around it loses its own tangents there:
https://github.com/pytorch/pytorch/issues/197867.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import (
    DERIVATIVES,
    FORWARD,
    apply_function,
    forward_mode_enabled,
    recording_levels,
    transforms,
    without_tangent,
)
from gradkit._core import pytree


def differentiated_jvps() -> AbstractContextManager[object]:
    """Differentiate the jvp of each Function in the block, if a transform around it asks for it."""
    return DifferentiatedJvps() if _are_differentiated(()) else nullcontext()


def function_with_differentiated_jvp(function: Any, given: Sequence[Any]) -> Any:
    """Return a Function whose jvp is differentiated where what it is given needs that."""
    return _made_differentiable(function) if _are_differentiated(given) else function


def _are_differentiated(given: Sequence[Any]) -> bool:
    stack = transforms()
    if FORWARD not in stack:
        return False
    innermost = len(stack) - 1 - stack[::-1].index(FORWARD)
    if not DERIVATIVES.isdisjoint(stack[:innermost]):
        return True
    return any(isinstance(x, Tensor) and 0 in recording_levels(x) for x in given)


class DifferentiatedJvps(TorchFunctionMode):
    """Sees the Functions that others call: in a jvp, a backward, a rule for vmap."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation."""
        if func is apply_function:
            function, *given = args
            args = function_with_differentiated_jvp(function, given), *given
        return func(*args, **kwargs or {})


def _made_differentiable(function: Any) -> Any:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The tangents of the level whose jvp is about to run are no part of what that computes.
        given: dict[int, Any] = {}

        def primal(tensor: Tensor) -> Tensor:
            result = without_tangent(tensor)
            given[id(result)] = tensor
            return result

        primals = pytree.map_tensors(primal, inputs)
        mark_dirty = ctx.mark_dirty
        ctx.mark_dirty = lambda *written: mark_dirty(*[given.get(id(x), x) for x in written])
        with torch.enable_grad(), forward_mode_enabled(), DifferentiatedJvps():
            function.setup_context(ctx, primals, output)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_mode_enabled(), DifferentiatedJvps():
            return function.jvp(ctx, *tangents)

    def vmap(*args: Any) -> Any:
        with DifferentiatedJvps():
            return function.vmap(*args)

    names: dict[str, Any] = {"setup_context": setup_context, "jvp": jvp}
    if function.vmap is not torch.autograd.Function.vmap:
        names["vmap"] = vmap
    members = {name: staticmethod(fn) for name, fn in names.items()}
    return type(function)(function.__name__, (function,), {"__module__": function.__module__, **members})
