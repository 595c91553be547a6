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
_NO_PARTS = (0,)
_NONE = frozenset({type(None)})


def list_distinct(module: nn.Module) -> tuple[list[Tensor], Structure, set[type]] | None:
    """Return the values of `dict(module.named_parameters())`, its structure, and the classes.

    None if a part lists them in a way of its own.
    """
    parts = _read(module)
    if parts is None:
        return None
    every, keys, classes = parts
    kept: tuple[int, ...] | None = None  # all
    tensors = every
    if len(set(map(id, every))) < len(every) or not _NONE.isdisjoint(map(type, every)):
        # Without None, as the bias of a layer that has none; a tied parameter has its first name.
        first = dict(zip(map(id, reversed(every)), reversed(range(len(every))), strict=True))
        first.pop(id(None), None)
        kept = tuple(sorted(first.values()))
        tensors = [every[index] for index in kept]
    spec = _spec(tuple(keys), kept)
    if spec.num_leaves < len(tensors):  # two have one name: torch takes one with a dot, set so
        return None
    return tensors, spec, classes  # type: ignore[return-value]


def named_parameters(module: nn.Module) -> tuple[dict[str, Tensor], set[type]]:
    """Return `dict(module.named_parameters())`, and the classes of the module and its parts."""
    parts = _read(module)
    if parts is None:
        return dict(module.named_parameters()), set(map(type, module.modules()))
    every, keys, classes = parts
    first: dict[int, tuple[str, Tensor]] = {}  # of its names, a tied parameter has the first
    for name, param in zip(_names(keys), every, strict=True):
        if param is not None:
            first.setdefault(id(param), (name, param))
    return dict(first.values()), classes


def _read(module: nn.Module) -> tuple[list[Tensor | None], Keys, set[type]] | None:
    """Return the parameters, what their names are made of, and the classes; None if torch has to.

    That is, where a part lists in a way of its own, or one with parts is in several places.
    """
    # In a fifth of torch's time, without its generators: a step of small layers asks twice, and
    # would spend a tenth of its time on it. Names are put together once for all calls.
    if "named_parameters" in module.__dict__:
        return None
    params: list[Tensor | None] = []
    keys: Keys = []
    parents: set[int] = set()  # a part without parts cannot be inside of itself
    classes: set[type] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None:  # a part that may be missing, and is
            keys += _NO_PARTS
            continue
        kind = type(part)
        if kind not in classes:
            if not lists_as_torch(kind):
                return None
            classes.add(kind)
        attributes = part.__dict__
        if "named_modules" in attributes:
            return None
        own = attributes["_parameters"]
        if own:
            keys += own
            params += own.values()
        parts = attributes["_modules"]
        if not parts:
            keys += _NO_PARTS
            continue
        if id(part) in parents:
            return None
        parents.add(id(part))
        keys += (len(parts), *parts)
        stack += reversed(parts.values())
    return params, keys, classes


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
def _spec(keys: tuple[str | int, ...], kept: tuple[int, ...] | None) -> Structure:
    names = _names(keys)
    return spec_of_keys(tuple(names if kept is None else [names[index] for index in kept]))
