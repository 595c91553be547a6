"""Which transforms of torch.func are around a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_read = torch._C._functorch.get_interpreter_stack

# The transforms whose value is a derivative.
DERIVATIVES = frozenset({"Grad", "Jvp"})
BATCH = "Vmap"


def transforms() -> tuple[str, ...]:
    """Return the transforms that are active, from the outermost: "Vmap", "Grad", "Jvp", ...

    A compiled function is traced again where these differ, so that they are constants in it.
    """
    return tuple(interpreter.key().name for interpreter in _read() or ())


# What torch.compiler.assume_constant_result does, which would import all of torch's compiler.
vars(transforms)["_dynamo_marked_constant"] = True


def differentiated() -> bool:
    """Return whether a transform around this call differentiates what it returns."""
    return not DERIVATIVES.isdisjoint(transforms())


def apart_from_the_outer_graph() -> AbstractContextManager[object]:
    """Record nothing in the graph of the caller, unless a transform of theirs differentiates.

    torch.func records what it does with tensors that require grad, and what it returns carries
    that graph [I1]. What stands between the levels of derivatives must be recorded.

    Returns:
        A context for the call.
    """
    if differentiated():
        return nullcontext()
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        return _left_inference_mode()
    return torch.no_grad()


@contextmanager
def _left_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
