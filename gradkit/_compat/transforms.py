"""Which transforms of torch.func are around a call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

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


def detached(tensor: Tensor) -> Tensor:
    """Return a tensor without the caller's graph, unless a transform of theirs differentiates it.

    torch.func records what it does with tensors that require grad, and what it returns carries
    that graph [I1]. Recording is not switched off instead: below a level of torch.func, operators
    would take it for inference (the LSTM of the CPU keeps nothing for its backward pass then).
    """
    around = transforms()
    # What vmap has batched says of itself that it does not require grad.
    may_have_graph = tensor.requires_grad or bool(around)
    return tensor.detach() if may_have_graph and DERIVATIVES.isdisjoint(around) else tensor


def is_dual(tensor: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward mode."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
