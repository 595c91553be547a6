"""The tensors, modules and generators that a function refers to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeGuard

from torch import Generator, Tensor, nn

CapturedObject: TypeAlias = Tensor | nn.Module | Generator

_MAX_DEPTH = 4
_LIBRARIES = {"gradkit", "torch"}
_MAX_LENGTH = 10_000  # a longer container is data, and not searched


def captured_by(*functions: object) -> list[CapturedObject]:
    """Return the tensors, modules and generators that functions, objects or containers refer to."""
    captured: dict[int, CapturedObject] = {}
    seen: set[int] = set()
    level = list(functions)
    for _ in range(_MAX_DEPTH):
        new = {id(value): value for value in level if id(value) not in seen}
        seen |= new.keys()
        captured |= {key: value for key, value in new.items() if _is_captured(value)}
        level = [part for key in new if key not in captured for part in _contents(new[key])]
    return list(captured.values())


def _is_captured(value: object) -> TypeGuard[CapturedObject]:
    # isinstance(value, Generator) calls a method of torch's, for each function and each number.
    return isinstance(value, Tensor | nn.Module) or type(value) is Generator


def _contents(value: object) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        # What inspect.getclosurevars reads, in less time. Libraries refer to the caller's objects
        # by closures only.
        of_library = str(value.__module__).partition(".")[0] in _LIBRARIES
        names = () if of_library else value.__code__.co_names
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*chain.from_iterable(map(_cell, value.__closure__ or ())), *read, *defaults]
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        items = value.values() if isinstance(value, Mapping) else value
        return list(items) if len(value) <= _MAX_LENGTH else []
    if isinstance(value, type | BuiltinFunctionType | ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), *([type(value).__call__] if callable(value) else [])]


def _cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # the variable has no value yet
        return []
