"""What a function can use: tensors, modules and generators in its closure, globals, arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Generator, Tensor, nn

Captured: TypeAlias = Tensor | nn.Module | Generator

_MAX_DEPTH = 4
_MAX_LENGTH = 10_000  # a longer container is data, and not searched


def captured_by(function: object) -> list[Captured]:
    """Return the tensors, modules and generators that a function, object or container refers to."""
    captured: dict[int, Captured] = {}
    seen: set[int] = set()
    level: list[Any] = [function]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Captured):
                captured[id(value)] = value
            else:
                below += _contents(value)
        level = below
    return list(captured.values())


def _contents(value: object) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        try:
            names = inspect.getclosurevars(value)
        except ValueError:  # a variable of its closure has no value yet
            return defaults
        return [*names.nonlocals.values(), *names.globals.values(), *defaults]
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        items = value.values() if isinstance(value, Mapping) else value
        return list(items) if len(value) <= _MAX_LENGTH else []
    if isinstance(value, type | BuiltinFunctionType | ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), *([type(value).__call__] if callable(value) else [])]
