"""What a call returns: owned gradients, zeros where nothing is reached, and aux."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import transforms
from gradkit._core import pytree
from gradkit._core.ownership import own, zeros_for
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message

_CONSTANTS = (str, bytes, Number, Enum, torch.dtype, torch.device, torch.Size, torch.layout)


def check_unused_can_be_known(unused: str) -> None:
    """Raise while torch.compile traces, which cannot tell what is reached, unless it is zeros."""
    if unused != "zeros" and torch.compiler.is_compiling():
        expected = "'zeros' under torch.compile, which cannot tell what a loss reaches"
        raise OptionError(message("unused", expected, repr(unused), "unused='zeros'"))


def owned(
    grads: list[Tensor | None], variables: Sequence[Tensor], leading: tuple[int, ...] = ()
) -> list[Tensor | None]:
    """Return gradients that share memory with nothing; empties the list, which must be the last."""
    reached = [index for index, grad in enumerate(grads) if grad is not None]
    present = [grad for grad in grads if grad is not None]
    count = len(grads)
    grads.clear()  # `own` looks for further references
    likes = [variables[index] for index in reached]
    # In a transform, and while torch.compile traces, nobody can tell what shares memory.
    if transforms():
        present = [grad.clone() for grad in present]
    elif torch.compiler.is_compiling():
        pairs = zip(present, likes, strict=True)
        present = copied(present, [_empty_for(grad, like, leading) for grad, like in pairs])
    else:
        own(present, likes, leading)
    by_variable = dict(zip(reached, present, strict=True))
    return [by_variable.get(index) for index in range(count)]


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


def split_aux(returned: object) -> tuple[Any, Any]:
    """Return the losses and aux that a function has returned."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned[0], returned[1]
    expected, fix = "(losses, aux), with has_aux=True", "return losses, aux"
    raise StructureError(message("fn", expected, describe(returned), fix))


def require_tensor_or_constant(leaf: object, where: Callable[[], str], fix: str) -> None:
    """Raise for a leaf that may be a container of tensors, which optree does not know."""
    if leaf is None or isinstance(leaf, (Tensor, *_CONSTANTS)) or callable(leaf):
        return
    expected = "a tensor, or a constant: a number, text, a function, a module"
    got = f"{describe(leaf)}, which is no tree that optree knows"
    raise LeafTypeError(message(where(), expected, got, fix))


def tensors_of(tree: PyTree) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], PyTree]]:
    """Return the tensors of a tree, and a function that puts others in their places."""
    leaves, spec = pytree.flatten(tree)
    fix = "return a dict; or register the class: optree.register_pytree_node"
    for index, leaf in enumerate(leaves):
        require_tensor_or_constant(leaf, partial(pytree.path, spec, index, "aux"), fix)
    constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def put_back(tensors: Iterable[Tensor]) -> PyTree:
        rest = iter(tensors)
        return pytree.unflatten(spec, [next(rest) if c is None else c[0] for c in constants])

    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], put_back
