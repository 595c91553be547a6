"""Hooks on the forward pass of one module, which copies of the module do not have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn
from torch.utils.hooks import RemovableHandle

from gradkit._compat.dynamo import disable_compile, is_compiled_module
from gradkit._compat.undoing import undone
from gradkit._core import user_code

# Of a module's arguments, those by keyword among them, or of its output.
SeeInput: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], None]
SeeOutput: TypeAlias = Callable[[Any], None]


class _Inert:
    """What a copied or unpickled module has in place of a hook."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _ModuleHook:
    """A hook of one module, until it is closed."""

    def __init__(self, module: nn.Module, see: Callable[..., None]) -> None:
        self._module: nn.Module | None = module
        self._see: Callable[..., None] | None = see

    @disable_compile
    def __call__(self, module: nn.Module, args: Any, rest: Any) -> None:
        """See a run of the module: what it returned, or its arguments by keyword."""
        # A copy of the module may share the table of hooks, or have another of the same hooks.
        if module is self._module and self._see is not None:
            self._see(args, rest)

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()

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
    module: nn.Module, see_output: SeeOutput, see_input: SeeInput | None = None
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
        handles += user_code.register_own_hooks_on_runs(module, before, after)
        yield
