"""Finds the Python code that writes on gradients during a pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import BackwardHook

from gradkit._compat.autograd import TorchDispatchMode, storage_address
from gradkit._core.params import Params
from gradkit._core.written import written_tensors
from gradkit.errors import warn_fallback


class WriteFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which gradients arrive in a pass, and what is written by Python code in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: list[tuple[int, str]] = []  # the storage, and where the code is
        # For each variable, what arrived and how many writes there had been.
        self._arrived: list[tuple[int, Tensor, int]] = []

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
            self._writes += [(_address(tensor), location) for tensor in written]
        return result

    def arrive(self, variable: int, grad: Tensor) -> None:
        """Note that the gradient of a variable arrives; its memory is kept until the pass ends."""
        self._arrived.append((variable, grad, len(self._writes)))

    def report(self, params: Params) -> None:
        """Warn of each gradient that was written on."""
        lines: list[str] = []
        for variable, grad, before in self._arrived:
            address = _address(grad)
            after = [location for storage, location in self._writes[before:] if storage == address]
            first = [location for storage, location in self._writes[:before] if storage == address]
            for when, locations in (("after", after), ("before", first)):
                wrote = f"wrote on its gradient {when} it had arrived"
                lines += [f"{params.path(variable)}: {location} {wrote}" for location in locations]
        if lines:
            warn_fallback(
                "; ".join(dict.fromkeys(lines))
                + ". The gradients that are returned were copied as they arrived: a write after "
                "that has not changed them, one before it may have. Return a new tensor there: "
                "lambda grad: grad.clamp(-1, 1), and not grad.clamp_(-1, 1)"
            )


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; of a sparse one, that of its values."""
    if tensor.layout != torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    return storage_address(tensor)


def _location(frame: FrameType | None) -> str | None:
    """Return where the code of a hook or Function is that runs an operation; None for torch's."""
    location: str | None = None
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        module = frame.f_globals.get("__name__", "")
        if location is None and not module.startswith("torch."):
            code = frame.f_code
            location = f"{code.co_qualname} ({code.co_filename}, line {frame.f_lineno})"
        hook = frame.f_locals.get("self") if module == BackwardHook.__module__ else None
        if location is not None and isinstance(hook, BackwardHook):
            return f"a backward hook of {type(hook.module).__name__}, {location},"
        frame = frame.f_back
    return location
