"""The attributes of a module, put back after a forward pass."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn


@contextmanager
def module_restored(module: nn.Module, *, hooks: bool = False) -> Iterator[None]:
    """Put back a module's attributes, and the items of its lists and dicts; `hooks` too."""
    # What a forward pass computes from the tensors of a call would stay behind in the module: a
    # weight that a hook makes, a cache. And of a module that stands in another under two names,
    # torch.func.functional_call leaves the tensors of the call as its parameters.
    if torch.compiler.is_compiling():  # which sees no assignment that it does not undo
        yield
        return
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    inside = [
        (value, value.copy())
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) in _CONTAINERS and (hooks or name not in _HOOKS)
    ]
    try:
        yield
    finally:
        for now, was in before:
            now.clear()
            now.update(was)
        for now, was in inside:
            if not _is_same(now, was):  # else the caller's loop over it goes on
                now.clear()
                (now.extend if type(now) is list else now.update)(was)


def _is_same(now: Any, was: Any) -> bool:
    """Return whether a container has the things that it had, in their order."""
    if isinstance(now, set):
        return bool(now == was)
    if isinstance(now, dict):
        return list(now) == list(was) and all(map(is_, now.values(), was.values()))
    return len(now) == len(was) and all(map(is_, now, was))


_CONTAINERS = (list, dict, OrderedDict, set)
_HOOKS = {name for name in vars(nn.Module()) if name.endswith("hooks")}
