"""`checked`: watches the forward pass, writes on gradients, and optimizers that step without."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradkit._checks.recomputed_values import recording
from gradkit._compat.transforms import function_modes, remove_function_mode, slip_under_modes
from gradkit._compat.undoing import undo_stack, undone
from gradkit._core.user_code import register_own_hooks
from gradkit._torch_bugs.monitor import ForwardMonitor
from gradkit.errors import warn_fallback


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


def _checked_forward() -> CheckedForward:
    """Return the monitor of this thread, or a new one."""
    mine = (mode for mode in function_modes() if isinstance(mode, CheckedForward))
    return next(mine, None) or CheckedForward()


open_monitors: list[StepMonitor] = []  # of all threads


class StepMonitor:
    """Warns once of an optimizer that steps without a gradient, though gradkit returned some."""

    def __init__(self) -> None:
        self._returned: dict[int, ref[Tensor]] = {}
        self._began_idle: set[int] = set()  # the optimizers in whose step a closure may run
        self._warned = False
        self._handles: list[RemovableHandle] = []
        self.blocks: set[object] = set()  # that have not ended

    def enter_block(self, block: object) -> None:
        """Look at every step that an optimizer of this process takes, until the last block ends."""
        self.blocks.add(block)
        if self not in open_monitors:
            open_monitors.append(self)
        if not self._handles:
            self._handles += register_own_hooks(
                partial(register_optimizer_step_pre_hook, self._before),
                partial(register_optimizer_step_post_hook, self._after),
            )

    def leave_block(self, block: object) -> None:
        """Stop, if this is the last block; to leave one again does no harm."""
        self.blocks.discard(block)
        if not self.blocks and self in open_monitors:
            open_monitors.remove(self)
        while not self.blocks and self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def note(self, variables: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Note the tensors whose gradients a call returns."""
        pairs = zip(variables, grads, strict=True)
        self._returned |= {id(v): ref(v) for v, grad in pairs if grad is not None}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if all(param.grad is None for param in _params(optimizer)):
            self._began_idle.add(id(optimizer))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure may have written the gradients, and a hook may have cleared them.
        began_idle = id(optimizer) in self._began_idle
        self._began_idle.discard(id(optimizer))
        params = list(_params(optimizer))
        if self._warned or not began_idle or any(param.grad is not None for param in params):
            return
        noted = (self._returned.get(id(param)) for param in params)
        if any(
            one is not None and one() is param for one, param in zip(noted, params, strict=True)
        ):
            self._warned = True
            warn_fallback(
                f"{type(optimizer).__name__} has stepped with every .grad None, and changed "
                "nothing, though gradkit has returned gradients of its parameters: call "
                "gradkit.step_(optimizer, params, grads) instead of optimizer.step(), with "
                "max_norm= instead of clip_grad_norm_"
            )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


_of_process = StepMonitor() if os.environ.get("GRADKIT_CHECKED", "0") not in ("", "0") else None
_monitor = ContextVar("monitor", default=_of_process)
for _watching in (_of_process, _checked_forward(), recording) if _of_process is not None else ():
    _watching.enter_block("GRADKIT_CHECKED")


@contextmanager
def checked() -> Iterator[None]:
    """Watch the forward pass, writes on gradients, and steps without gradients; slow.

    A hook, or the backward of a custom Function, that writes on the gradient it is given may spoil
    that of another tensor, which torch hands the same memory. Inside this context no two parts of a
    pass are handed the same memory: each result is, bit for bit, what it is where hooks and
    Functions write on copies. A `GradkitWarning` of the eager calls names each place that wrote,
    its file and line. `backward_` stays what `.backward()` is.

    Another one, once, is for a loop of which only half was moved: `optimizer.step()` runs with
    every `.grad` None, after gradkit has returned gradients of its parameters. All optimizers of
    the process are watched while the context is open.

    Operations that this thread calls, the forward pass included, whose first derivative torch gets
    wrong, or whose graph it drops (`torch.special.bessel_j0`), are differentiated by a formula, or
    raise.

    A checkpoint (`use_reentrant=False`) whose forward pass ran inside has to recompute the values
    that it had. Else, as after a step of an optimizer, or with random numbers of numpy, eager calls
    raise `UnsupportedGraphError`, and name what has changed of what its function refers to.

    The environment variable `GRADKIT_CHECKED=1` does the same for a whole process, and for the
    operations of the thread that imports gradkit.

    Example:
        >>> import torch, gradkit, warnings
        >>> a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> z = a * 1
        >>> def tenfold(grad):
        ...     grad.mul_(10)
        >>> handle = z.register_hook(tenfold)
        >>> with gradkit.checked(), warnings.catch_warnings(record=True, action="always") as caught:
        ...     value, grads = gradkit.value_and_grads(((z + b) * torch.ones(2)).sum(), [a, b])
        >>> grads
        [tensor([10., 10.]), tensor([1., 1.])]
        >>> "tenfold" in str(caught[0].message)
        True

    Yields:
        Nothing.

    Raises:
        UnsupportedGraphError: An operation, called in the block, has no right derivative.

    Source:
        torch forbids such writes ("the hook should not modify its argument"),
        https://pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
    """
    # A block that a generator holds may end before one that began inside it, and in another thread:
    # one monitor serves all that overlap, and is closed with the last, wherever that ends.
    monitor = step_monitor()
    if monitor is None:
        monitor = StepMonitor()
        _monitor.set(monitor)
    block, watching = object(), (monitor, _checked_forward(), recording)
    with undo_stack() as stack:
        for one in watching:
            stack.enter_context(undone(partial(one.leave_block, block)))
        for one in watching:
            one.enter_block(block)
        yield


def is_checked() -> bool:
    """Return whether calls here hand each part of a pass memory of its own."""
    monitor = _monitor.get()
    return monitor is not None and bool(monitor.blocks)


def step_monitor() -> StepMonitor | None:
    """Return what notes which gradients were returned, inside `checked()`."""
    return _monitor.get() if is_checked() else None
