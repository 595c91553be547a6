"""The attributes of a module, put back; and tensors in the places of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._compat.undoing import undone
from gradkit._state.exclusive_modules import alone_with

_CONTAINERS = (list, dict, OrderedDict, set)
_OF_EVERY_MODULE = list(vars(nn.Module()))
_HOOK_TABLES = {name for name in _OF_EVERY_MODULE if name.endswith("hooks")}
_LAST = len(_OF_EVERY_MODULE) - 1
# Which of these are containers, the tables of hooks apart.
_TABLES = itemgetter("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModuleSnapshot:
    """The attributes, lists and dictionaries of a module; with `hooks`, its hooks, too."""

    def __init__(self, module: nn.Module, *, hooks: bool = False) -> None:
        self.parts = list(module.named_modules())  # it and all below, once, by the first name
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        for _, part in self.parts:
            attributes = vars(part)
            self._attributes.append((attributes, attributes.copy()))
            for value in _may_be_containers(attributes, hooks):
                if type(value) in _CONTAINERS:
                    if value:
                        self._containers.append((value, value.copy()))
                    else:
                        self._empty.append(value)

    def restore(self) -> None:
        """Put back what has changed."""
        for attributes, copy in self._attributes:
            _restore(attributes, copy)
        for container, copy in self._containers:
            _restore(container, copy)
        for container in filter(None, self._empty):
            container.clear()


def _may_be_containers(attributes: dict[str, Any], hooks: bool) -> Iterable[Any]:
    """Return the values among which the lists and dictionaries of a part are."""
    if hooks:
        return attributes.values()
    # As long as its constructor begins with that of nn.Module, its own attributes come last.
    if next(islice(attributes, _LAST, None), None) == _OF_EVERY_MODULE[_LAST]:
        return chain(_TABLES(attributes), islice(attributes.values(), _LAST + 1, None))
    return [value for name, value in attributes.items() if name not in _HOOK_TABLES]


def _restore(container: Any, copy: Any) -> None:
    """Give a container the objects that it had, in their order."""
    # One with the same keys keeps its size, and is never empty: the caller, or another thread, may
    # be iterating over it.
    if isinstance(container, dict) and list(islice(container, len(copy))) == list(copy):
        container.update(copy)
        for key in list(islice(container, len(copy), None)):
            del container[key]
    elif not isinstance(container, dict) and _is_same(container, copy):
        return
    else:
        container.clear()
        (container.extend if type(container) is list else container.update)(copy)


def _is_same(container: Any, copy: Any) -> bool:
    if isinstance(container, set):
        return bool(container == copy)
    return len(container) == len(copy) and all(map(is_, container, copy))


@contextmanager
def attributes_put_back(
    module: nn.Module, *, hooks: bool = False
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Put back the attributes, lists and dictionaries of a module; with `hooks`, its hooks, too.

    Yields its parts by name. Until the block ends, another thread waits at such a block.
    """
    # Otherwise what a forward pass computes from the tensors of a call would stay in the module: a
    # weight that a hook makes, a cache. And in a module that is part of another under two names,
    # torch.func.functional_call leaves the tensors of the call as its parameters.
    if torch.compiler.is_compiling():  # it rejects assignments that it cannot undo itself
        yield []
        return
    with alone_with(module):
        snapshot = ModuleSnapshot(module, hooks=hooks)
        with undone(snapshot.restore):
            yield snapshot.parts


class TensorSlots:
    """Where the parameters and buffers of a module stand, to be replaced by other tensors."""

    # What torch.func.functional_call looks up by name, tensor by tensor, one walk finds for all.

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        # A tensor of the module's own, its table, its key there, and its name.
        self._slots: list[tuple[Tensor, dict[str, Any], str, str]] = []
        self._buffers: list[tuple[str, nn.Module, str]] = []  # a name, the part, and the key there
        self._fit = True
        for prefix, part in parts:
            before = f"{prefix}." if prefix else ""
            parameters, buffers = part._parameters, part._buffers
            self._fit &= isinstance(parameters, dict)  # not so where torch.jit keeps the tensors
            for key, parameter in parameters.items():
                if parameter is not None:
                    self._slots.append((parameter, parameters, key, before + key))
            for key, buffer in buffers.items():
                if buffer is not None:
                    self._slots.append((buffer, buffers, key, before + key))
                    self._buffers.append((before + key, part, key))

    def fill(self, tensors: Mapping[str, Tensor]) -> bool:
        """Put tensors in place of the module's own; False, and nothing done, if they misfit."""
        # A tensor of the module that stands in several places is named once, by the first.
        by_own = {id(own): tensors[name] for own, _, _, name in self._slots if name in tensors}
        if not self._fit or len(by_own) != len(tensors):
            return False
        if (
            len(tensors) != len(self._slots)
            and {id(own) for own, *_ in self._slots} - by_own.keys()
        ):
            return False
        for own, table, key, _ in self._slots:
            table[key] = by_own[id(own)]
        return True

    def buffers(self) -> dict[str, Any]:
        """Return what stands in the places of the buffers now, by all their names."""
        return {name: getattr(part, key, None) for name, part, key in self._buffers}
