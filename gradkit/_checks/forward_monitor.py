"""Watches the operations of eager code inside `checked()`: what an eager call cannot see later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from gradkit._checks.op_monitor import active_monitors, name_of, run_by_eager_code
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import function_modes, remove_function_mode, slip_under_modes


class ForwardMonitor(TorchFunctionMode):
    """Gives the operations whose first derivative torch gets wrong a formula, or refuses them.

    `with ForwardMonitor():` is for code that gradkit calls; blocks of `checked()` may overlap.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks = 0

    @leave_uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; inside a call of gradkit.func, its own monitor sees to that."""
        name = name_of(func)
        if name is None or not (self._blocks and torch.is_grad_enabled()) or active_monitors():
            return func(*args, **kwargs) if kwargs else func(*args)
        return run_by_eager_code(name, func, args, kwargs or {})

    def __enter__(self) -> Self:
        """Watch until the end of the block."""
        self._blocks += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def enter_block(self) -> None:
        """Watch until the last of some blocks that overlap has ended."""
        # At the bottom: with a mode of the user's that begins before the block and ends inside, the
        # top of the stack is taken off, whatever stands there.
        if not self._blocks and self not in function_modes():
            slip_under_modes(self)
        self._blocks += 1

    def leave_block(self) -> None:
        """End a block; in another thread, the mode stays and does nothing."""
        self._blocks -= 1
        if not self._blocks:
            remove_function_mode(self)


def forward_monitor() -> ForwardMonitor:
    """Return the monitor of this thread, or a new one."""
    mine = (mode for mode in function_modes() if isinstance(mode, ForwardMonitor))
    return next(mine, None) or ForwardMonitor()
