"""What records the gradients of extra tensors in passes, as safe_retain does; and how to hide one.

A recorder's hooks run in the passes of every thread, and record those of its own, which also go out
of their way to reach its tensors. A pass is hidden, or scaled afterwards, by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradkit._compat.autograd import current_pass
from gradkit._compat.undoing import undone


class PassObserver(Protocol):
    """Something that needs the gradients of extra tensors from every pass in this thread."""

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and the edges where their gradients arrive, or raise."""

    def scale(self, passes: Set[int], factor: Tensor) -> None:
        """Multiply what passes with these numbers have given."""


class _Observers(local):
    def __init__(self) -> None:
        self.active: list[PassObserver] = []
        self.begin: Callable[[int], None] | None = None  # is called with the number of each pass


observers = _Observers()
_hidden_passes: set[int] = set()


@contextmanager
def observing(observer: PassObserver) -> Iterator[None]:
    """Include the observer's tensors in every pass of this thread inside the block."""
    active = observers.active  # of this thread: a generator may end the block in another one

    def end() -> None:
        active[:] = [other for other in active if other is not observer]

    with undone(end):
        active.append(observer)
        yield


def any_observers() -> bool:
    """Return whether passes of this thread include extra tensors, and are recorded."""
    return bool(observers.active)


def observed_tensors() -> list[tuple[Tensor, GradientEdge]]:
    """Return the extra tensors and their edges, or raise what an observer raises."""
    return [pair for observer in observers.active for pair in observer.before_pass()]


def in_hidden_pass() -> bool:
    """Return whether this hook runs in a pass that is hidden from observers."""
    return bool(_hidden_passes) and current_pass() in _hidden_passes


def begin_of_passes() -> Callable[[int], None] | None:
    """Return what is to be called with the number of a pass as it begins, if anything is."""
    return observers.begin


@contextmanager
def numbered_passes() -> Iterator[Set[int]]:
    """Yield the numbers of the passes of rows that this thread begins in the block."""
    numbers: set[int] = set()
    with _beginning_with(numbers.add if any_observers() else None):
        yield numbers


@contextmanager
def hidden_passes() -> Iterator[None]:
    """Hide the passes of rows that this thread begins in the block from every observer."""
    if not any_observers():
        yield
        return
    numbers: set[int] = set()

    def hide(number: int) -> None:  # in the thread of a device
        numbers.add(number)
        _hidden_passes.add(number)

    active = observers.active

    def end() -> None:
        observers.active = active
        _hidden_passes.difference_update(numbers)

    with undone(end), _beginning_with(hide):
        observers.active = []
        yield


@contextmanager
def _beginning_with(begin: Callable[[int], None] | None) -> Iterator[None]:
    with undone(partial(setattr, observers, "begin", observers.begin)):
        observers.begin = begin
        yield


def scale_recorded(passes: Set[int], factor: Tensor) -> None:
    """Multiply what has been recorded in passes with these numbers."""
    for observer in list(observers.active) if passes else ():
        observer.scale(passes, factor)
