"""One thread at a time where a call puts other tensors into a module, or its own back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event

import torch
from torch import nn

from gradkit._compat.autograd import calling_thread
from gradkit._compat.undoing import undone
from gradkit.errors import UnsupportedGraphError, message

_LONGEST_WAIT = 600.0  # seconds


class _Use:
    """A block of one thread in which modules are its own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        # In a backward pass, the thread that waits for it: what that uses is the pass's to use.
        self.thread = calling_thread()
        self.ended = Event()
        self.waits_for: _Use | None = None

    def shares_with(self, other: _Use) -> bool:
        """Return whether some module is a part of both."""
        return not self._parts().isdisjoint(other._parts())

    def _parts(self) -> set[int]:
        return {id(part) for module in self.modules for part in module.modules()}


# In the order in which they began. One that is not the first waits for those before it; appending
# and removing need no lock.
_uses: list[_Use] = []


@contextmanager
def alone_with(*modules: nn.Module) -> Iterator[None]:
    """Let no other thread into such a block with these modules, or with one that shares a part.

    Raises UnsupportedGraphError where two threads would wait for each other.
    """
    if torch.compiler.is_compiling() or not modules:
        yield
        return
    use = _Use(modules)
    with undone(partial(_end, use)):
        _uses.append(use)
        while len(_uses) > 1 and (other := _blocking(use)):
            _wait(use, other)
        yield


def _end(use: _Use) -> None:
    if use in _uses:
        _uses.remove(use)
    use.ended.set()


def _blocking(use: _Use) -> _Use | None:
    """Return a block of another thread that has to end before this one begins, if there is one."""
    before = list(_uses)
    before = before[: before.index(use)]
    for index, other in enumerate(before):
        if other.thread == use.thread or not other.shares_with(use):
            continue
        # One that waits for a block around this one, of this thread, has not begun.
        around = (one for one in before[:index] if one.thread == use.thread)
        if not any(one.shares_with(other) for one in around):
            return other
    return None


def _wait(use: _Use, other: _Use) -> None:
    use.waits_for = other
    if _wait_for_each_other(use) or not other.ended.wait(_LONGEST_WAIT):
        names = " and ".join(sorted({type(module).__name__ for module in use.modules}))
        expected = "a module, and parts of it, that no other thread uses, or not for long"
        got = f"{names} in a call of another thread, which waits for this one, or has not returned "
        got += f"for {_LONGEST_WAIT:.0f} seconds"
        fix = "copy.deepcopy(module) for each thread; or call modules that share parts in one order"
        raise UnsupportedGraphError(message("module", expected, got, fix))
    use.waits_for = None


def _wait_for_each_other(use: _Use) -> bool:
    """Return whether the thread that a block waits for waits, in the end, for its own thread."""
    seen: set[int] = set()
    waiting: _Use | None = use
    # One that has ended is still there until the thread that waits for it runs again.
    while waiting and (other := waiting.waits_for) and not other.ended.is_set():
        if other.thread == use.thread:
            return True
        if other.thread in seen:
            return False
        seen.add(other.thread)
        of_thread = (one for one in list(_uses) if one.thread == other.thread)
        waiting = next((one for one in of_thread if one.waits_for), None)
    return False
