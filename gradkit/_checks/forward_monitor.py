"""Watches the operations of eager code inside `checked()`: what an eager call cannot see later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradkit._checks.foreign_operators import is_foreign, refuse_dropped
from gradkit._checks.op_monitor import active_monitors, name_of, run_by_eager_code
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import function_modes, remove_function_mode, slip_under_modes


class ForwardMonitor(TorchFunctionMode):
    """Gives operations whose first derivative torch gets wrong, or drops, a formula, or refuses."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = 1  # that have not ended; torch.compile cannot trace a property here

    @leave_uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; inside a call of gradkit.func, its own monitor sees to that."""
        is_watched = self._blocks and torch.is_grad_enabled() and not active_monitors()
        name = name_of(func) if is_watched else None
        if name is not None:
            return run_by_eager_code(name, func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if is_watched and is_foreign(func) and not torch.compiler.is_compiling():
            refuse_dropped(func, (args, kwargs), result)
        return result


class CheckedForward(ForwardMonitor):
    """The monitor of a thread's `checked()` blocks, which may overlap."""

    def __init__(self) -> None:
        super().__init__()
        self._open: set[object] = set()
        self._blocks = 0

    def enter_block(self, block: object) -> None:
        """Watch until the last block has ended."""
        # At the bottom: with a mode of the user's that begins before the block and ends inside, the
        # top of the stack is taken off, whatever stands there.
        self._open.add(block)
        if self not in function_modes():
            slip_under_modes(self)
        self._blocks = len(self._open)

    def leave_block(self, block: object) -> None:
        """End a block, once or more; in another thread, the mode stays and does nothing."""
        self._open.discard(block)
        self._blocks = len(self._open)
        if not self._blocks:
            remove_function_mode(self)


def checked_forward() -> CheckedForward:
    """Return the monitor of this thread, or a new one."""
    mine = (mode for mode in function_modes() if isinstance(mode, CheckedForward))
    return next(mine, None) or CheckedForward()
