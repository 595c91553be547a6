"""Finds the Python code that writes on gradients during a pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from gradkit._autograd.unshared_memory import memory_address
from gradkit._compat.autograd import TorchDispatchMode
from gradkit._compat.checkpoints import CHECKPOINT_MODULE
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._core.ownership import written_tensors
from gradkit._core.params import Params
from gradkit.errors import warn_fallback


class WriteFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which gradients arrive in a pass, and what is written by Python code in it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: list[tuple[int, str]] = []  # the storage, and where the code is
        # For each variable, what arrived and how many writes there had been.
        self._arrived: list[tuple[int, Tensor, int]] = []
        # Copies, by their storage, of what torch would have shared; they are kept until the end.
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    @leave_uncompiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note the tensors that it writes on."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        location = _location(sys._getframe(1)) if written else None
        if location is not None:
            self._writes += [(memory_address(tensor), location) for tensor in written]
        return result

    def note_copy(self, grad: Tensor, copy: Tensor) -> None:
        """Note that a part of the pass got a copy of a gradient that torch would have shared."""
        self._copied[memory_address(copy)] = grad, copy

    def arrive(self, variable: int, grad: Tensor) -> None:
        """Note that the gradient of a variable arrives; its memory is kept until the pass ends."""
        self._arrived.append((variable, grad, len(self._writes)))

    def report(self, params: Params) -> None:
        """Warn of each gradient on whose memory, as torch would have shared it, was written."""
        writes = [(self._shared(address), location) for address, location in self._writes]
        lines: list[str] = []
        for variable, grad, before in self._arrived:
            address = self._shared(memory_address(grad))
            for when, some in (("after", writes[before:]), ("before", writes[:before])):
                wrote = f"wrote on its gradient {when} it had arrived"
                lines += [
                    f"{params.path(variable)}: {location} {wrote}"
                    for storage, location in some
                    if storage == address
                ]
        if lines:
            warn_fallback(
                "; ".join(dict.fromkeys(lines))
                + ". The gradients that are returned are right: each part of this pass had a copy "
                "of its own. Elsewhere, torch shares the memory. Return a new tensor there: "
                "lambda grad: grad.clamp(-1, 1), and not grad.clamp_(-1, 1)"
            )

    def _shared(self, address: int) -> int:
        """Return the storage of which torch would have shared the one at an address."""
        while address in self._copied:
            address = memory_address(self._copied[address][0])
        return address


_ENGINE = {"_engine_run_backward", "run_engine"}  # what calls it


def _location(frame: FrameType | None) -> str | None:
    """Return where the code of a hook or Function is that runs an operation; None for torch's."""
    location: str | None = None
    while frame is not None and frame.f_code.co_name not in _ENGINE:
        module = frame.f_globals.get("__name__", "")
        if module == CHECKPOINT_MODULE:
            return None  # it recomputes, and writes on what it has made
        if location is None and not module.startswith("torch."):
            code = frame.f_code
            location = f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"
        hook = frame.f_locals.get("self") if module == BackwardHook.__module__ else None
        if location is not None and isinstance(hook, BackwardHook):
            return f"a backward hook of {type(hook.module).__name__}, {location},"
        frame = frame.f_back
    return location
