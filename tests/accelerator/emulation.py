"""Starts the emulated accelerator, and collects what it sees."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from tests.accelerator import build, modules

KINDS = ("cuda", "npu")  # one that torch and gradkit know of, and one that they do not
KIND = os.environ.get("GRADKIT_EMULATE", "")  # which of them this process is to have


def start() -> str | None:
    """Have a device of the kind that is asked for; return why there is none, if there cannot be.

    It is there from now on, and has to be before the first backward pass of a process.
    """
    if KIND not in ("", *KINDS):
        return f"GRADKIT_EMULATE is {KIND!r}; there is: {', '.join(KINDS)}"
    reason = build.why_not() if KIND else None
    if KIND and reason is None:
        torch.ops.load_library(str(build.library()))
        torch.ops.emulated.start(KIND)
        modules.complete(KIND)
        # A thread of a device that lets go of a tensor after the end would abort the process.
        atexit.register(time.sleep, 0.1)
    return reason


def waits() -> AbstractContextManager[list[str]]:
    """Collect what in a block waits for the device."""
    return _collected(torch.ops.emulated.take_waits)


def hazards() -> AbstractContextManager[list[str]]:
    """Collect what two streams touch in a block without an order between them."""
    torch.accelerator.synchronize()  # what a test before has left on another stream is done
    return _collected(torch.ops.emulated.take_hazards)


@contextmanager
def _collected(take: Callable[[], list[str]]) -> Iterator[list[str]]:
    seen: list[str] = []
    take()
    yield seen
    seen += take()
