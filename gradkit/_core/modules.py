"""What a module holds: its parameters, the classes of its parts, its hooks, its submodules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradkit._compat.dynamo import disable_compile, is_compiled_module
from gradkit._compat.modules import lists_as_torch
from gradkit._compat.undoing import undone
from gradkit._core import user_code
from gradkit._core.pytree import Structure, spec_of_keys
from gradkit.errors import OptionError, StructureError, describe, message

# The names of the parameters of each part in order, the number of its parts, and their names.
Keys: TypeAlias = list[str | int]
_NO_PARTS = (0,)
_NONE = frozenset({type(None)})


def list_distinct(module: nn.Module) -> tuple[list[Tensor], Structure, set[type]] | None:
    """Return what `named_parameters` lists, its structure, and the classes; None if not sure."""
    parts = _read(module)
    if parts is None:
        return None
    every, keys, classes = parts
    kept: tuple[int, ...] | None = None  # all
    tensors = every
    if len(set(map(id, every))) < len(every) or not _NONE.isdisjoint(map(type, every)):
        # A layer's missing bias, None, is left out; a tied parameter has its first name.
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
    first: dict[int, tuple[str, Tensor]] = {}  # a tied parameter has its first name
    for name, param in zip(_names(keys), every, strict=True):
        if param is not None:
            first.setdefault(id(param), (name, param))
    return dict(first.values()), classes


def _read(module: nn.Module) -> tuple[list[Tensor | None], Keys, set[type]] | None:
    """Return the parameters, what their names are made of, and the classes; None if not sure."""
    # Torch has to list where a part does so in its own way, or one with parts is in several places.
    # This takes a fifth of its time, without generators: a step of small layers asks twice, and
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


class _ModuleHook:
    """A hook of one module, until it is closed."""

    def __init__(
        self, module: nn.Module | None = None, see: Callable[..., None] | None = None
    ) -> None:
        self._module, self._see = module, see

    @disable_compile
    def __call__(self, module: nn.Module, args: Any, rest: Any) -> None:
        """See a run of the module: what it returned, or its arguments by keyword."""
        # A copy of the module may share the table of hooks, or have another of the same hooks.
        if module is self._module and self._see is not None:
            self._see(args, rest)

    def __reduce__(self) -> tuple[type[_ModuleHook], tuple[()]]:
        return _ModuleHook, ()  # the hook of a copied or unpickled module does nothing

    def close(self) -> None:
        """Do nothing from now on, and keep nothing alive."""
        self._module = self._see = None


def inside_compiled(
    modules: Mapping[str, nn.Module], names: Collection[str]
) -> list[tuple[str, list[str]]]:
    """Return names of compiled modules, each with modules inside of which one runs if it does."""
    groups: list[tuple[str, list[str]]] = []
    for compiled in [name for name, module in modules.items() if is_compiled_module(module)]:
        original = f"{compiled}._orig_mod".removeprefix(".")
        groups.append((compiled, [name for name in names if name == original]))
        groups.append((compiled, [name for name in names if name.startswith(f"{original}.")]))
    return [(compiled, inside) for compiled, inside in groups if inside]


@contextmanager
def watching_runs(
    module: nn.Module,
    see_output: Callable[[Any], None],
    see_input: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Call functions with what a module is given and returns, for each of its runs in the block."""
    after = _ModuleHook(module, lambda _, output: see_output(output))
    before = None if see_input is None else _ModuleHook(module, see_input)
    handles: list[RemovableHandle] = []

    def end() -> None:
        user_code.remove_hooks(handles)
        for hook in filter(None, (before, after)):
            hook.close()

    with undone(end):
        register = [partial(module.register_forward_hook, after)]
        if before is not None:
            register.append(partial(module.register_forward_pre_hook, before, with_kwargs=True))
        handles += user_code.register_own_hooks(*register)
        yield


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
