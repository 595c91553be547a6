"""Whether what a checkpoint computes again depends on its arguments alone."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.checkpoints import checkpointed
from gradkit._core import pytree

_LIBRARIES = {"builtins", "gradkit", "math", "numpy", "torch"}
_MAKE_FUNCTIONAL = "gradkit.func._make_functional"
_CONSTANTS = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def frame_of_arguments(unpack_hook: object) -> object | None:
    """Return the checkpoint of a hook if its function reads constants and arguments only."""
    seen = checkpointed(unpack_hook)
    if seen is None:
        return None
    leaves, _ = pytree.flatten((seen.args, seen.kwargs))
    is_pure = all(isinstance(x, Tensor) or _is_constant(x, set()) for x in leaves)
    return seen.frame if is_pure and _is_constant(seen.function, set()) else None


def _is_constant(value: Any, known: set[int]) -> bool:
    """Return whether a value stays what it is, and so does all that it reads, if it is called."""
    if isinstance(value, _CONSTANTS) or id(value) in known:
        return True
    if isinstance(value, ModuleType | type):
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
        return _is_of_library(name)
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__  # of a method, what it is bound to
        return owner is None or (
            isinstance(owner, ModuleType | type) and _is_constant(owner, known)
        )
    if isinstance(value, tuple):
        return all(_is_constant(item, known) for item in value)
    if not isinstance(value, FunctionType):
        return False  # a module, a method, a tensor, a container: another one, or changed, later
    known.add(id(value))
    if value.__module__ == _MAKE_FUNCTIONAL:
        return True  # `call`, which computes with the parameters that it is given
    if _is_of_library(value.__module__):
        return all(_is_constant(_content(cell), known) for cell in value.__closure__ or ())
    return all(_is_constant(part, known) for part in _read_by(value))


def _is_of_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function refers to besides its arguments."""
    yield from map(_content, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    names = _names(function.__code__)
    yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return cell


def _names(code: CodeType) -> set[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)
