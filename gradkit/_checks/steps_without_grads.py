"""Steps of an optimizer that has no gradient: gradkit returned them, and nothing wrote `.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradkit._core.user_code import register_own_hooks_around_steps
from gradkit.errors import warn_fallback

open_monitors: list[StepMonitor] = []  # of all threads


class StepMonitor:
    """Warns once of an optimizer that steps without a gradient, though gradkit returned some."""

    def __init__(self) -> None:
        self._returned: dict[int, ref[Tensor]] = {}
        self._began_idle: set[int] = set()  # the optimizers in whose step a closure may run
        self._warned = False
        self._blocks: set[object] = set()
        self._handles: list[RemovableHandle] = []

    @property
    def is_open(self) -> bool:
        """Whether a block that uses it has not ended."""
        return bool(self._blocks)

    def enter_block(self, block: object) -> None:
        """Look at every step that an optimizer of this process takes, until the last block ends."""
        self._blocks.add(block)
        if self not in open_monitors:
            open_monitors.append(self)
        if not self._handles:
            self._handles += register_own_hooks_around_steps(self._before, self._after)

    def leave_block(self, block: object) -> None:
        """Stop, if this is the last block; to leave one again does no harm."""
        self._blocks.discard(block)
        if not self._blocks and self in open_monitors:
            open_monitors.remove(self)
        while not self._blocks and self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def note(self, variables: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
        """Note the tensors whose gradients a call returns."""
        pairs = zip(variables, grads, strict=True)
        self._returned |= {id(v): ref(v) for v, grad in pairs if grad is not None}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_idle(optimizer):
            self._began_idle.add(id(optimizer))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure may have written the gradients, and a hook may have cleared them.
        began_idle = id(optimizer) in self._began_idle
        self._began_idle.discard(id(optimizer))
        if self._warned or not began_idle or not _is_idle(optimizer):
            return
        if any(self._has_returned(param) for param in _params(optimizer)):
            self._warned = True
            warn_fallback(
                f"{type(optimizer).__name__} has stepped with every .grad None, and changed "
                "nothing, though gradkit has returned gradients of its parameters: call "
                "gradkit.step_(optimizer, params, grads) instead of optimizer.step(), with "
                "max_norm= instead of clip_grad_norm_"
            )

    def _has_returned(self, param: Tensor) -> bool:
        noted = self._returned.get(id(param))
        return noted is not None and noted() is param


def _is_idle(optimizer: Optimizer) -> bool:
    return all(param.grad is None for param in _params(optimizer))


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
