"""`checked`: finds what an eager call by itself does not see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gradkit._checks.forward_monitor import checked_forward
from gradkit._checks.recomputed_values import recording
from gradkit._checks.steps_without_grads import StepMonitor
from gradkit._compat.undoing import undo_stack

_of_process = StepMonitor() if os.environ.get("GRADKIT_CHECKED", "0") not in ("", "0") else None
_monitor = ContextVar("monitor", default=_of_process)
if _of_process is not None:
    _of_process.enter_block("GRADKIT_CHECKED")
    checked_forward().enter_block("GRADKIT_CHECKED")
    recording.enter_block("GRADKIT_CHECKED")


@contextmanager
def checked() -> Iterator[None]:
    """Watch the forward pass, writes on gradients, and steps without gradients; slow.

    A hook, or the backward of a custom Function, that writes on the gradient it is given may spoil
    that of another tensor, which torch hands the same memory. gradkit's eager calls refuse such a
    gradient where they see that it was written on. Inside this context no two parts of a pass are
    handed the same memory: each result is, bit for bit, what it is where hooks and Functions write
    on copies. A `GradkitWarning` of the eager calls names each place that wrote: the hook or
    function, its file and line. `backward_` stays what `.backward()` is.

    One more `GradkitWarning`, once, is for a loop of which only half was moved: `optimizer.step()`
    runs with every `.grad` None, after gradkit has returned gradients of its parameters. Steps are
    seen by hooks that all optimizers of the process run while the context is open.

    The operations that this thread calls, the forward pass included, are seen one by one: those
    whose first derivative torch gets wrong, or whose graph it drops (`torch.special.bessel_j0`),
    are differentiated by a formula, or raise.

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
    block, watching = object(), (monitor, checked_forward(), recording)
    with undo_stack() as stack:
        for one in watching:
            stack.callback(one.leave_block, block)
        for one in watching:
            one.enter_block(block)
        yield


def is_checked() -> bool:
    """Return whether calls here hand each part of a pass memory of its own."""
    monitor = _monitor.get()
    return monitor is not None and monitor.is_open


def step_monitor() -> StepMonitor | None:
    """Return what notes which gradients were returned, inside `checked()`."""
    return _monitor.get() if is_checked() else None
