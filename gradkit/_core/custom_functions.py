"""Custom autograd Functions: whether a graph could hold one."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from gradkit._compat import ddp, fsdp

# Functions of torch's own in whose presence a functional gradient is incomplete or local.
REFUSED = frozenset({"CheckpointFunctionBackward", ddp.SINK, fsdp.POST_BACKWARD})


def custom_functions_alive() -> bool:
    """Return False only if no graph in this process holds a node of a Python Function.

    Those are the user's, and the few of torch's that are refused. A graph need not be walked as
    long as none exists; a walk costs a tenth of a small pass. Such a node is an instance of a class
    that `Function` makes, and CPython counts each instance as one reference to its class, so a
    class with more references than an idle one may have instances. Any other reference only causes
    a walk that was not needed.
    """
    if _free_threaded():
        return True  # references are not counted exactly there
    classes, idle = _classes_to_watch(repr(_functions_made))
    return any(_references(cls) > idle for cls in classes)


# torch numbers the Functions that are defined; the count tells when to look for new ones.
_functions_made = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


@lru_cache(maxsize=1)
def _classes_to_watch(_: str) -> tuple[list[ref[type]], int]:
    """Return the classes whose instances matter, and the references that an idle class has."""
    every = [ref(cls) for cls in BackwardCFunction.__subclasses__()]
    watched = [each for each in every if (cls := each()) and _matters(cls)]
    del cls
    # Most classes that torch brings have no instances.
    return watched, min(filter(None, map(_references, every)))


def _matters(cls: type) -> bool:
    return cls.__name__ in REFUSED or not _from_torch(cls)


def _references(cls: ref[type]) -> int:
    kind = cls()
    return 0 if kind is None else sys.getrefcount(kind)


@cache
def _free_threaded() -> bool:
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is not None and not enabled()


def user_functions(kinds: Iterable[type]) -> list[type]:
    """Return the types among `kinds` whose backward is code that did not come with torch."""
    return [k for k in kinds if issubclass(k, BackwardCFunction) and not _from_torch(k)]


# The class of an operator made with torch.library is named after its namespace; these are torch's.
_TORCH_OPERATORS = tuple(
    f"GeneratedBackwardFor_{ns}_" for ns in ("prims", "rngprims", "debug_mode_ops")
)


def _from_torch(kind: Any) -> bool:
    module: str = kind._forward_cls.__module__
    if module.startswith("torch._library"):  # may run what the user gave to register_autograd
        return bool(kind.__name__.startswith(_TORCH_OPERATORS))
    return module.startswith("torch.")
