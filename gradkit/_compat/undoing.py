"""What a block changes is undone as it ends, also where a KeyboardInterrupt comes in between.

An interrupt may come at any line. It finds a block's undoing registered before anything is done,
and an undoing that it cuts short is called again; so what undoes has to allow that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

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
