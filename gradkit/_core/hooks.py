"""Hooks on tensors: gradkit's own, and whether there are others."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def listen(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register a tensor hook of our own, which `hooks_registered` does not count."""
    with _own_hooks.lock:
        handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        _own_hooks.count += 1
    return handle


def hooks_of(tensor: Tensor) -> dict[object, Callable[[Tensor], Tensor | None]]:
    """Return the table of a tensor's hooks, which run in its order."""
    if tensor._backward_hooks is None:
        listen(tensor, lambda _: None).remove()
    return cast("dict[object, Callable[[Tensor], Tensor | None]]", tensor._backward_hooks)


def hooks_registered() -> bool:
    """Return False only if nothing in this process but gradkit has ever registered a hook.

    A hook that changes its gradient in place, g.clamp_(-1, 1), changes whatever the engine shares
    that tensor with, and a hook that keeps it keeps a result. torch numbers the handles that it
    gives out for hooks of all kinds; where they are cannot be seen from Python.
    """
    return RemovableHandle.next_id > _own_hooks.count


class _OwnHooks:
    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0


_own_hooks = _OwnHooks()
