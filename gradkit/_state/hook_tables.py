"""Hooks that a pass removes or registers: each pass of a call finds those that the call found.

A call that differentiates a loss in several passes would run a hook that removes itself in the
first alone, or in the batched one, if that is given up. Short: it is about two methods of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, TypeAlias

from torch.utils.hooks import RemovableHandle

from gradkit._compat.autograd import at_end_of_pass, calling_thread, current_pass, named_thread
from gradkit._compat.undoing import INSIDE, undone
from gradkit._core.user_code import hooks_registered

_Table: TypeAlias = dict[object, Any]  # the hooks by the numbers of their handles, in their order


class _HookTables:
    """The tables of hooks that the passes of one call have changed."""

    def __init__(self) -> None:
        # A table, what it had before, what the running pass has removed; by its id.
        self._now: dict[int, tuple[_Table, _Table, set[object]]] = {}
        # A table, what the first pass to change it has removed, and added; by its id.
        self._first: dict[int, tuple[_Table, set[object], _Table]] = {}

    def note(self, table: _Table) -> set[object]:
        """Note that a pass is about to change a table; return where removals are noted."""
        if not self._now:
            at_end_of_pass(self.put_back)
        return self._now.setdefault(id(table), (table, dict(table), set()))[2]

    def put_back(self) -> None:
        """Put back in its place what was removed; take out what was added."""
        for table, before, removed in self._now.values():
            added = {number: hook for number, hook in table.items() if number not in before}
            kept = removed.union(table)
            table.clear()  # the engine follows the order of insertion
            table.update({number: hook for number, hook in before.items() if number in kept})
            self._first.setdefault(id(table), (table, removed, added))
        self._now.clear()

    def change_as_one_pass(self) -> None:
        """Change each table as the first pass to do so has changed it."""
        for table, removed, added in self._first.values():
            for number in removed:
                table.pop(number, None)
            table.update(added)


_of_threads: dict[int, _HookTables] = {}  # by the thread that calls
_lock, _init, _remove = Lock(), RemovableHandle.__init__, RemovableHandle.remove


def _note(table: _Table | None) -> set[object]:
    tables = _of_threads.get(calling_thread()) if current_pass() != -1 else None
    return set() if tables is None or table is None else tables.note(table)


def _noted_init(handle: RemovableHandle, table: _Table, **options: Any) -> None:
    _note(table)
    _init(handle, table, **options)


def _noted_remove(handle: RemovableHandle) -> None:
    _note(handle.hooks_dict_ref()).add(handle.id)
    _remove(handle)


def hooks_kept() -> bool:
    """Return whether this thread is in a call whose passes all find the same hooks."""
    return calling_thread() in _of_threads


def put_hooks_back() -> None:
    """Put back what a pass that has failed has removed, before another takes its place."""
    if hooks_kept():
        _of_threads[calling_thread()].put_back()


@contextmanager
def same_hooks_in_each_pass(*, then_as_before: bool = False) -> Iterator[None]:
    """Let each pass in the block find the same hooks; leave them as one pass would have."""
    tables = _HookTables()

    def end() -> None:
        tables.put_back()
        with _lock, INSIDE:
            _of_threads.pop(thread, None)
            if not _of_threads:
                RemovableHandle.__init__, RemovableHandle.remove = _init, _remove  # type: ignore[method-assign]

    with named_thread() as thread, undone(end), INSIDE:
        with _lock, INSIDE:
            _of_threads[thread] = tables
            RemovableHandle.__init__, RemovableHandle.remove = _noted_init, _noted_remove  # type: ignore[method-assign, assignment]
        yield
    if not then_as_before:
        tables.change_as_one_pass()


def hooks_put_back() -> AbstractContextManager[None]:
    """Return a block whose passes leave the hooks as they were, to a pass that comes after it."""
    is_needed = hooks_registered() and not hooks_kept()
    return same_hooks_in_each_pass(then_as_before=True) if is_needed else INSIDE
