"""Hooks on tensors: registering them uncounted, and whether the user has registered any."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def listen(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register a hook of gradkit's on a tensor, which `hooks_registered` does not count."""
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

    A hook that changes its gradient in place, g.clamp_(-1, 1), changes every gradient that shares
    memory with it, and a hook that stores it stores a result. torch numbers the handles of hooks of
    all kinds; which tensors and modules have them cannot be seen from Python.
    """
    return RemovableHandle.next_id > _own_hooks.count


class _OwnHooks:
    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0


_own_hooks = _OwnHooks()
