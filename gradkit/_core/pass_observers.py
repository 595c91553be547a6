"""What records the gradients of extra tensors in passes, as safe_retain does; and how to hide one.

A recorder's hooks run in the passes of every thread. Passes of its own thread also go out of their
way to reach its tensors. A pass is hidden, or scaled afterwards, by its number in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from threading import local
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradkit._compat.autograd import current_pass
from gradkit._core.graph import Subgraph


class PassObserver(Protocol):
    """Something that needs the gradients of extra tensors from every pass in this thread."""

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and the edges where their gradients arrive, or raise."""

    def arrives_in(self, nodes: Collection[Node]) -> bool:
        """Return whether one of the gradients arrives at one of these nodes."""

    def scale(self, passes: Set[int], factor: Tensor) -> None:
        """Multiply what passes with these numbers have given."""


class _Observers(local):
    def __init__(self) -> None:
        self.active: list[PassObserver] = []
        self.hidden = False  # whether what this thread runs is to be seen by none
        self.begin: Callable[[int], None] | None = None  # is called with the number of each pass


_observers = _Observers()
all_observers: list[PassObserver] = []
_hidden_passes: set[int] = set()


@contextmanager
def observing(observer: PassObserver) -> Iterator[None]:
    """Include the observer's tensors in every pass of this thread inside the block."""
    active = _observers.active  # of this thread: a generator may end the block in another one
    active.append(observer)
    all_observers.append(observer)
    try:
        yield
    finally:
        all_observers.remove(observer)
        active.remove(observer)


def any_observers() -> bool:
    """Return whether passes of this thread include extra tensors."""
    return bool(_observers.active)


def observed_tensors() -> list[tuple[Tensor, GradientEdge]]:
    """Return the extra tensors and their edges, or raise what an observer raises."""
    return [pair for observer in _observers.active for pair in observer.before_pass()]


def may_be_recorded() -> bool:
    """Return whether a pass that runs now can meet a recorder, of any thread."""
    return bool(all_observers) and not _observers.hidden


def records_in(below: Subgraph) -> bool:
    """Return whether a pass of this thread through a graph would be recorded."""
    # Passes of this thread go to whatever its own recorders are for.
    if not may_be_recorded():
        return False
    return any_observers() or any(one.arrives_in(below.nodes) for one in list(all_observers))


def in_hidden_pass() -> bool:
    """Return whether this hook runs in a pass that is hidden from observers."""
    return bool(_hidden_passes) and current_pass() in _hidden_passes


def begin_of_passes() -> Callable[[int], None] | None:
    """Return what is to be called with the number of a pass as it begins, if anything is."""
    return _observers.begin


@contextmanager
def numbered_passes() -> Iterator[Set[int]]:
    """Yield the numbers of the passes of rows that this thread begins in the block."""
    numbers: set[int] = set()
    with _beginning_with(numbers.add if all_observers else None):
        yield numbers


@contextmanager
def hidden_passes() -> Iterator[None]:
    """Hide the passes of rows that this thread begins in the block from every observer."""
    if not may_be_recorded():
        yield
        return
    numbers: set[int] = set()

    def hide(number: int) -> None:  # in the thread of a device
        numbers.add(number)
        _hidden_passes.add(number)

    before = _observers.active, _observers.hidden
    _observers.active, _observers.hidden = [], True
    try:
        with _beginning_with(hide):
            yield
    finally:
        _observers.active, _observers.hidden = before
        _hidden_passes.difference_update(numbers)


@contextmanager
def _beginning_with(begin: Callable[[int], None] | None) -> Iterator[None]:
    before, _observers.begin = _observers.begin, begin
    try:
        yield
    finally:
        _observers.begin = before


def scale_recorded(passes: Set[int], factor: Tensor) -> None:
    """Multiply what has been recorded in passes with these numbers."""
    for observer in list(all_observers) if passes else ():
        observer.scale(passes, factor)
