"""Gradients as the caller gets them: owned, and zeros or None where nothing is reached."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core.ownership import own, zeros_for
from gradkit.errors import OptionError, message


def check_unused_can_be_known(unused: str) -> None:
    """Raise while torch.compile traces, which cannot tell what is reached, unless it is zeros."""
    if unused != "zeros" and torch.compiler.is_compiling():
        raise OptionError(
            message(
                "unused",
                "'zeros' under torch.compile, which cannot tell what a loss reaches",
                repr(unused),
                "unused='zeros'",
            )
        )


def owned(
    grads: list[Tensor | None], variables: Sequence[Tensor], leading: tuple[int, ...] = ()
) -> list[Tensor | None]:
    """Return gradients that share memory with nothing; empties the list, which must be the last."""
    reached = [index for index, grad in enumerate(grads) if grad is not None]
    present = [grad for grad in grads if grad is not None]
    count = len(grads)
    grads.clear()  # `own` looks for further references
    present = _owned(present, [variables[index] for index in reached], leading)
    by_variable = dict(zip(reached, present, strict=True))
    return [by_variable.get(index) for index in range(count)]


def _owned(grads: list[Tensor], variables: list[Tensor], leading: tuple[int, ...]) -> list[Tensor]:
    # In a transform, and while torch.compile traces, nobody can tell what shares memory.
    if transforms():
        return [grad.clone() for grad in grads]
    if torch.compiler.is_compiling():
        pairs = zip(grads, variables, strict=True)
        return copied(grads, [_empty_for(grad, variable, leading) for grad, variable in pairs])
    own(grads, variables, leading)
    return grads


def _empty_for(grad: Tensor, variable: Tensor, leading: tuple[int, ...]) -> Tensor:
    if leading:
        return torch.empty_like(grad, memory_format=torch.contiguous_format)
    return torch.empty_like(variable, dtype=grad.dtype)


def copied(tensors: Sequence[Tensor], buffers: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return copies that share no memory, in these buffers where torch.compile traces."""
    if not tensors or not torch.compiler.is_compiling() or transforms():
        return [tensor.clone() for tensor in tensors]
    # By one operation for all: of several clones of one tensor, inductor makes one.
    into = [torch.empty_like(tensor) for tensor in tensors] if buffers is None else list(buffers)
    torch._foreach_copy_(into, list(tensors))
    return into


def zeros(variable: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return a dense zero gradient, also while torch.compile traces."""
    if torch.compiler.is_compiling():
        shape = (*leading, *variable.shape)
        return torch.zeros(shape, dtype=variable.dtype, device=variable.device)
    return zeros_for(variable, leading)


def cast_to(dtypes: Sequence[torch.dtype], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients in these dtypes."""
    return [
        grad if grad is None or grad.dtype == dtype else grad.to(dtype)
        for grad, dtype in zip(grads, dtypes, strict=True)
    ]
