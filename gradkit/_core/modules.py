"""The parameters of a module, and the classes of its parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from torch import Tensor, nn

from gradkit._compat.modules import lists_as_torch
from gradkit._core.pytree import Structure, spec_of_keys

# For each part in order: the names of its parameters, the number of its parts, and their names.
Keys: TypeAlias = list[str | int]


def list_distinct(module: nn.Module) -> tuple[list[Tensor], Structure, set[type]] | None:
    """Return the values of `dict(module.named_parameters())`, its structure, and the classes.

    None if some are tied, or a part lists them in a way of its own.
    """
    parts = _read(module)
    if parts is None or _any_tied(parts[0]):
        return None
    tensors, keys, classes = parts
    return tensors, _spec(tuple(keys)), classes


def named_parameters(module: nn.Module) -> tuple[dict[str, Tensor], set[type]]:
    """Return `dict(module.named_parameters())`, and the classes of the module and its parts."""
    parts = _read(module)
    if parts is None:
        return dict(module.named_parameters()), set(map(type, module.modules()))
    tensors, keys, classes = parts
    named = list(zip(_names(keys), tensors, strict=True))
    if _any_tied(tensors):
        first: dict[int, tuple[str, Tensor]] = {}  # of its names, a tied parameter has the first
        for name, param in named:
            first.setdefault(id(param), (name, param))
        named = list(first.values())
    return dict(named), classes


def _read(module: nn.Module) -> tuple[list[Tensor], Keys, set[type]] | None:
    """Return the parameters, what their names are made of, and the classes; None if torch has to.

    That is, where a part lists in a way of its own, or one with parts is in several places.
    """
    # In a fifth of torch's time, without its generators: a step of small layers asks twice, and
    # would spend a tenth of its time on it. Names are put together once for all calls.
    if "named_parameters" in module.__dict__:
        return None
    tensors: list[Tensor] = []
    keys: Keys = []
    parents: set[int] = set()  # a part without parts cannot be inside of itself
    classes: set[type] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None:  # a part that may be missing, and is
            keys.append(0)
            continue
        kind = type(part)
        if kind not in classes:
            if not lists_as_torch(kind):
                return None
            classes.add(kind)
        attributes = part.__dict__
        if "named_modules" in attributes:
            return None
        for name, param in attributes["_parameters"].items():
            if param is not None:
                keys.append(name)
                tensors.append(param)
        parts = attributes["_modules"]
        keys.append(len(parts))
        if parts:
            if id(part) in parents:
                return None
            parents.add(id(part))
            keys += parts
            stack += reversed(parts.values())
    return tensors, keys, classes


def _any_tied(tensors: list[Tensor]) -> bool:
    return len(set(map(id, tensors))) < len(tensors)


def _names(keys: Iterable[str | int]) -> list[str]:
    """Return the full names of the parameters."""
    names: list[str] = []
    prefixes, rest = [""], iter(keys)
    while prefixes:
        prefix = prefixes.pop()
        for key in rest:
            if isinstance(key, int):  # the last of this part's own
                parts = [f"{prefix}{next(rest)}." for _ in range(key)]
                prefixes += reversed(parts)
                break
            names.append(prefix + key)
    return names


@lru_cache(maxsize=64)
def _spec(keys: tuple[str | int, ...]) -> Structure:
    return spec_of_keys(tuple(_names(keys)))
