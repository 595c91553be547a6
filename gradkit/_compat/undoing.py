"""What a block changes is undone as it ends, also where a KeyboardInterrupt comes in between.

An interrupt may come at any line. It finds a block's undoing registered before anything is done,
and an undoing that it cuts short is called again; so what undoes has to allow that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, _GeneratorContextManager, contextmanager, nullcontext
from functools import wraps
from inspect import GEN_CLOSED, GEN_SUSPENDED, getgeneratorstate
from typing import Any, ParamSpec, TypeVar

from gradkit.errors import StructureError, message

P = ParamSpec("P")
T = TypeVar("T")

# An interrupt at the end of `with manager:` comes before the manager is left, and outside of it.
# In `with manager, INSIDE:` it comes before this one is left, and inside of the manager. A manager
# that is a generator needs none: it is closed when nothing refers to it any more.
INSIDE = nullcontext()


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call a function after the block, and once more if an interrupt has cut it short."""
    is_undone = False
    try:
        try:
            yield
        finally:
            undo()
            is_undone = True
    finally:
        if not is_undone:
            undo()


@contextmanager
def undo_stack() -> Iterator[ExitStack]:
    """Yield a stack that is closed after the block; what is in it is not told of an exception."""
    stack = ExitStack()
    with undone(stack.close):
        yield stack


class _Block(_GeneratorContextManager[T, None, None]):
    """What a with statement enters, and others after it; contextlib's can be entered only once."""

    def __enter__(self) -> T:
        given: Any = self
        state = getgeneratorstate(given.gen)
        if state == GEN_SUSPENDED:
            name = given.func.__name__
            got, fix = "this one once more, inside of its own", f"another {name}(...) for each"
            raise StructureError(message(name, "a block that has ended", got, fix))
        if state == GEN_CLOSED:
            given.gen = given.func(*given.args, **given.kwds)
        return next(self.gen)


def block(fn: Callable[P, Iterator[T]]) -> Callable[P, _Block[T]]:
    """Return what contextlib.contextmanager does, for a block that may be entered again."""

    @wraps(fn)
    def make(*args: P.args, **kwargs: P.kwargs) -> _Block[T]:
        given: Any = fn
        return _Block(given, args, kwargs)

    return make
