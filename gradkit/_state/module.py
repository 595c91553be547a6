"""The attributes of a module, put back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, OrderedDict, set)
_HOOK_TABLES = {name for name in vars(nn.Module()) if name.endswith("hooks")}


@contextmanager
def attributes_put_back(module: nn.Module, *, hooks: bool = False) -> Iterator[None]:
    """Put back the attributes, lists and dictionaries of a module; with `hooks`, its hooks, too.

    Otherwise what a forward pass computes from the tensors of a call would stay in the module: a
    weight that a hook makes, a cache. And in a module that is part of another under two names,
    torch.func.functional_call leaves the tensors of the call as its parameters.
    """
    if torch.compiler.is_compiling():  # it rejects assignments that it cannot undo itself
        yield
        return
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    containers = [
        (value, value.copy())
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) in _CONTAINERS and (hooks or name not in _HOOK_TABLES)
    ]
    try:
        yield
    finally:
        for attributes, copy in before:
            attributes.clear()
            attributes.update(copy)
        for container, copy in containers:
            if not _is_same(container, copy):  # unchanged: the caller may be iterating over it
                container.clear()
                (container.extend if type(container) is list else container.update)(copy)


def _is_same(container: Any, copy: Any) -> bool:
    """Return whether a container has the objects that it had, in their order."""
    if isinstance(container, set):
        return bool(container == copy)
    if isinstance(container, dict):
        return list(container) == list(copy) and all(map(is_, container.values(), copy.values()))
    return len(container) == len(copy) and all(map(is_, container, copy))
