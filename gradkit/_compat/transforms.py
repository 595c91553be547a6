"""Which transforms of torch.func are around a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

_read = torch._C._functorch.get_interpreter_stack

# The transforms whose value is a derivative.
DERIVATIVES = frozenset({"Grad", "Jvp"})
BATCH = "Vmap"


# Whether a tensor is one that torch.func's grad, vjp or jvp records.
is_gradtracking: Callable[[Tensor], bool] = torch._C._functorch.is_gradtrackingtensor


# Whether a tensor belongs to a level of torch.func: grad, vjp, jvp or vmap.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


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


def ordinary_mode() -> AbstractContextManager[object]:
    """Leave inference mode: a gradient made in it could not take part in autograd later [E6]."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


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


def is_tracked(tensor: Tensor) -> bool:
    """Return whether a derivative transform of torch.func tracks a tensor. Run on torch 2.13."""
    return bool(torch._C._functorch.is_gradtrackingtensor(tensor))
