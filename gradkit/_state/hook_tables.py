"""Hooks that a pass removes or registers: each pass of a call finds those that the call found.

A hook that removes itself is of the loss. A call that differentiates a loss in several passes would
run it in the first of them alone; in the batched one, if that is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

from torch.utils.hooks import RemovableHandle

from gradkit._compat.autograd import at_end_of_pass, calling_thread, current_pass
from gradkit._compat.undoing import undone

_Table: TypeAlias = dict[object, Any]  # the hooks by the numbers of their handles, in their order


@dataclass
class _Change:
    """What a pass has removed from a table, and added to it."""

    table: _Table
    before: _Table
    removed: set[object] = field(default_factory=set)
    added: set[object] = field(default_factory=set)

    def put_back(self) -> _Table:
        """Put the table back, and return what was added."""
        now = dict(self.table)
        kept = {key: hook for key, hook in self.before.items() if key in {*now, *self.removed}}
        others = {key: hook for key, hook in now.items() if key not in {*kept, *self.added}}
        self.table.clear()  # the engine follows the order of insertion
        self.table.update(kept | others)
        return {key: hook for key, hook in now.items() if key in self.added}


class _HookTables:
    """The tables of hooks that the passes of one call have changed."""

    def __init__(self) -> None:
        self._changes: dict[int, _Change] = {}  # of the pass that runs
        self._first: dict[int, tuple[_Table, set[object], _Table]] = {}  # of the first to do so

    def change(self, table: _Table) -> _Change:
        """Return what the pass that runs has changed of a table, before it does."""
        if not self._changes:
            at_end_of_pass(self.put_back)
        return self._changes.setdefault(id(table), _Change(table, dict(table)))

    def put_back(self) -> None:
        """Put all tables back."""
        for key, change in self._changes.items():
            self._first.setdefault(key, (change.table, change.removed, change.put_back()))
        self._changes.clear()

    def leave_as_one_pass_does(self) -> None:
        """Change the tables again, as the first pass has changed each."""
        for table, removed, added in self._first.values():
            for key in removed:
                table.pop(key, None)
            table.update(added)


_of_threads: dict[int, _HookTables] = {}  # by the thread that calls
_lock = Lock()
_init, _remove = RemovableHandle.__init__, RemovableHandle.remove


def _noted_init(handle: RemovableHandle, table: _Table, **options: Any) -> None:
    tables = _of_threads.get(calling_thread()) if current_pass() != -1 else None
    change = None if tables is None else tables.change(table)
    _init(handle, table, **options)
    if change is not None:
        change.added.add(handle.id)


def _noted_remove(handle: RemovableHandle) -> None:
    tables = _of_threads.get(calling_thread()) if current_pass() != -1 else None
    table = None if tables is None else handle.hooks_dict_ref()
    if tables is not None and table is not None and handle.id in table:
        change = tables.change(table)
        (change.added if handle.id in change.added else change.removed).symmetric_difference_update(
            {handle.id}
        )
    _remove(handle)


def hooks_kept() -> bool:
    """Return whether this thread is in a call whose passes all find the same hooks."""
    return calling_thread() in _of_threads


def put_hooks_back() -> None:
    """Put back what a pass that has failed did to hooks, before another takes its place."""
    tables = _of_threads.get(calling_thread())
    if tables is not None:
        tables.put_back()


@contextmanager
def same_hooks_in_each_pass() -> Iterator[None]:
    """Let each pass in the block find the same hooks; leave them as one pass would have."""
    thread = calling_thread()
    if thread in _of_threads:
        yield
        return
    tables = _HookTables()

    def end() -> None:
        tables.put_back()
        with _lock:
            _of_threads.pop(thread, None)
            if not _of_threads:
                RemovableHandle.__init__, RemovableHandle.remove = _init, _remove

    with undone(end):
        with _lock:
            _of_threads[thread] = tables
            RemovableHandle.__init__, RemovableHandle.remove = _noted_init, _noted_remove
        yield
    tables.leave_as_one_pass_does()
