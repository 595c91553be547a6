"""Passes that start from tensors which no other has, so that their hooks tell which pass it is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from gradkit._compat.autograd import current_pass, run_engine
from gradkit._compat.transforms import COMPILED_AUTOGRAD, compiled_autograd_disabled
from gradkit._compat.undoing import INSIDE, undo_stack
from gradkit._core import user_code
from gradkit._core.grad_recorder import (
    any_observers,
    begin_of_passes,
    hidden_passes,
    observed_tensors,
)
from gradkit._state.grad_attribute import grads_put_back


@contextmanager
def own_roots(outputs: Sequence[Tensor], begin: Callable[[int], None]) -> Iterator[list[Tensor]]:
    """Yield views of outputs; `begin` gets the number of a pass from them, before other hooks."""
    # Other threads, and passes inside hooks, go through the same tensors at the same time.

    def begin_pass(_: Tensor) -> None:
        begin(current_pass())

    with undo_stack() as stack:
        with torch.enable_grad(), INSIDE:
            roots = [output.view_as(output) for output in outputs]
        for root in roots:
            stack.callback(user_code.register_own_hook(root, begin_pass).remove)
        if COMPILED_AUTOGRAD in sys.modules:  # which would trace the hooks, to run at another time
            stack.enter_context(compiled_autograd_disabled())
        yield roots


@contextmanager
def numbered_roots(outputs: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield what a pass is to start from if its number is asked for; else the outputs."""
    begin = begin_of_passes()
    if begin is None:
        yield outputs
    else:
        with own_roots(outputs, begin) as roots:
            yield roots


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the passes of rows in the block from safe_retain: no call returns their gradients."""
    if not any_observers():
        yield
        return
    # Raises as a pass that is recorded would, and leaves the `.grad` of these tensors alone.
    tensors = {id(t): t for t, _ in observed_tensors() if t.retains_grad and not t.is_leaf}
    with grads_put_back(list(tensors.values())), hidden_passes():
        yield


_thread = threading.local()


@cache
def _leaf_of_numbered_passes() -> Tensor:
    with torch.inference_mode(False):
        leaf = torch.zeros((), device="cpu", requires_grad=True)
    user_code.register_own_hook(leaf, lambda _: setattr(_thread, "number", current_pass()))
    return leaf


def number_of_a_pass() -> int:
    """Return the number of a pass that is run for it: torch counts those of the process."""
    leaf = _leaf_of_numbered_passes()
    traced = COMPILED_AUTOGRAD in sys.modules
    with compiled_autograd_disabled() if traced else nullcontext():
        run_engine((leaf,), (leaf.detach(),), False, False, (leaf,), False)
    return int(_thread.number)
