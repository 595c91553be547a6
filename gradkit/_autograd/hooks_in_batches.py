"""Hooks in a batched pass, where a gradient is a batch of them in disguise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from gradkit._compat.autograd import is_batch
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.undoing import undo_stack
from gradkit._core import pytree, user_code


class HookInBatchError(RuntimeError):
    """A hook has computed with a batch: its `.data` crashes the process, its std() is wrong."""


@contextmanager
def hooks_refused() -> Iterator[None]:
    """Raise if a hook computes with a batch in the block, also where the hook catches the error."""
    if not user_code.hooks_registered():
        yield
        return
    guard = _HookGuard()
    with undo_stack() as stack:
        stack.enter_context(guard)
        yield
    if guard.has_met:
        raise HookInBatchError(_HOOK)


_HOOK = "a hook computes with the gradient, which in a batched pass is a batch of them"


class _HookGuard(TorchFunctionMode):
    """Raises when Python code computes with a batch; the engine itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.has_met = False

    @leave_uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, unless an argument is a batch."""
        kwargs = kwargs or {}
        if any(map(is_batch, pytree.tensors((args, kwargs)))):
            self.has_met = True
            raise HookInBatchError(_HOOK)
        return func(*args, **kwargs)
