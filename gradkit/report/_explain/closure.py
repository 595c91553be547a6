"""What a function can get at: tensors, modules, generators, by its closure, globals, arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Generator, Tensor, nn

Held: TypeAlias = Tensor | nn.Module | Generator

_DEPTH = 4
_LONGEST = 10_000  # more values in one container are data, and not looked through


def held_by(function: object) -> list[Held]:
    """Return the tensors, modules and generators that a function holds, as far as can be seen.

    Args:
        function: A function, a method, a partial, a module, an object, or containers of such.

    Returns:
        Those in its closure, defaults, bound arguments and the globals that it names, and in the
        attributes of objects there: a trainer, say.
    """
    found: dict[int, Held] = {}
    seen: set[int] = set()
    level: list[Any] = [function]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Held):
                found[id(value)] = value
            else:
                below += _inside(value)
        level = below
    return list(found.values())


def tensors_of(held: Iterable[Held]) -> dict[int, Tensor]:
    """Return the tensors among these, and the parameters of the modules, by their ids."""
    tensors: list[Tensor] = []
    for one in held:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, nn.Module):
            tensors += one.parameters()
    return {id(tensor): tensor for tensor in tensors}


def _inside(value: object) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        try:
            names = inspect.getclosurevars(value)
        except ValueError:  # it closes over a name that has no value yet
            return defaults
        return [*names.nonlocals.values(), *names.globals.values(), *defaults]
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        inside = value.values() if isinstance(value, Mapping) else value
        return list(inside) if len(value) <= _LONGEST else []
    if isinstance(value, type | BuiltinFunctionType | ModuleType) or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), *([type(value).__call__] if callable(value) else [])]
