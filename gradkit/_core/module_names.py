"""The submodules that names and globs stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from gradkit.errors import OptionError, StructureError, describe, message


def choose_modules(
    modules: Mapping[str, nn.Module], names: str | Sequence[str] | None
) -> dict[str, bool]:
    """Return the names that are meant, and whether each is given as it is, and not by a glob."""
    chosen: dict[str, bool] = {}
    for pattern in _read_names(modules, names):
        is_exact = not any(character in pattern for character in "*?[")
        fits = {name: is_exact for name in modules if fnmatchcase(name, pattern)}
        if not fits:
            raise StructureError(message("names", *_expected(modules, repr(names))))
        chosen |= {name: chosen.get(name, False) or is_exact for name in fits}
    return chosen


def _read_names(
    modules: Mapping[str, nn.Module], names: str | Sequence[str] | None
) -> Sequence[str]:
    if isinstance(names, str):
        return [names]
    if names is None:
        raise StructureError(message("names", *_expected(modules, "None")))
    is_list = isinstance(names, Iterable) and not isinstance(names, nn.Module | Tensor)
    patterns: list[Any] = list(names) if is_list else [names]
    wrong = [pattern for pattern in patterns if not isinstance(pattern, str)]
    if wrong:
        raise OptionError(message("names", *_expected(modules, describe(wrong[0]))))
    if not patterns:
        raise StructureError(message("names", *_expected(modules, "none")))
    return patterns


def _expected(modules: Mapping[str, nn.Module], got: str) -> tuple[str, str, str]:
    """Return what `names` has to be, what it is, and what it could be."""
    listed = ", ".join(map(repr, [name for name in modules if name][:12]))
    fix = 'names="*" for all of them' + (f", or a list of some: {listed}" if listed else "")
    return "names of submodules or globs, each of which fits one", got, fix
