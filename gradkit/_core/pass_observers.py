"""What needs the gradients of extra tensors from every pass of a thread, as safe_retain does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge


class PassObserver(Protocol):
    """Something that needs the gradients of extra tensors from every pass in this thread."""

    def before_pass(self) -> list[tuple[Tensor, GradientEdge]]:
        """Return the tensors and the edges where their gradients arrive, or raise."""


class _Observers(local):
    def __init__(self) -> None:
        self.active: list[PassObserver] = []


_observers = _Observers()


@contextmanager
def observing(observer: PassObserver) -> Iterator[None]:
    """Include the observer's tensors in every pass of this thread inside the block."""
    _observers.active.append(observer)
    try:
        yield
    finally:
        _observers.active.remove(observer)


def any_observers() -> bool:
    """Return whether passes of this thread include extra tensors."""
    return bool(_observers.active)


def observed_tensors() -> list[tuple[Tensor, GradientEdge]]:
    """Return the extra tensors and their edges, or raise what an observer raises."""
    return [pair for observer in _observers.active for pair in observer.before_pass()]
