"""A pass in which no two nodes are handed the same memory, for `checked()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.autograd import storage_address
from gradkit._compat.transforms import layers
from gradkit._compat.undoing import undo_stack
from gradkit._core.user_code import Cotangents, register_own_hook_after_node

# What is called with a gradient, and the copy that is handed on in its place.
NoteCopy: TypeAlias = Callable[[Tensor, Tensor], object]


@contextmanager
def without_shared_memory(
    nodes: Iterable[Node], note_copy: NoteCopy = lambda grad, copy: None
) -> Iterator[None]:
    """Copy what a node hands to more than one other, in every pass through these nodes."""
    # So a hook or a Function that writes on its gradient in place changes its own alone, whether it
    # runs before or after another has been captured, or summed up [A3, L3].
    with undo_stack() as stack:
        for node in nodes:
            if any(child is not None for child, _ in node.next_functions):
                last = register_own_hook_after_node(
                    node, lambda grads, _: _separated(grads, (), note_copy)
                )
                stack.callback(last.remove)
                hooks = cast("dict[int, object]", last.hooks_dict_ref())
                others = [key for key in hooks if key != last.id]
                if others:
                    first = register_own_hook_after_node(
                        node, partial(_separated, note_copy=note_copy)
                    )
                    stack.callback(first.remove)
                    # The engine follows the order of insertion, and not OrderedDict's.
                    for key in (*others, last.id):
                        hooks[key] = hooks.pop(key)
        yield


def _separated(grads: Cotangents, received: Cotangents, note_copy: NoteCopy) -> Cotangents:
    """Return gradients that share memory neither with each other nor with what was received."""
    taken = {memory_address(grad) for grad in received if grad is not None}
    separate: list[Tensor | None] = []
    for grad in grads:
        if grad is None or memory_address(grad) not in taken:
            separate.append(grad)
        else:
            copy = _copied(grad)
            note_copy(grad, copy)
            separate.append(copy)
        if grad is not None:
            taken.add(memory_address(grad))
    return tuple(separate)


def _copied(grad: Tensor) -> Tensor:
    """Return a copy; an expanded tensor stays one, since hooks may look at strides."""
    if grad.layout != torch.strided or grad.is_nested or 0 not in grad.stride():
        return grad.clone()
    once = [slice(0, 1) if stride == 0 else slice(None) for stride in grad.stride()]
    return grad[tuple(once)].clone().expand(grad.shape)


def memory_address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; of a sparse one, that of its values."""
    *_, data = layers(tensor)
    if data.layout != torch.strided:
        data = data._values() if data.is_sparse else data.values()
    return storage_address(data)
