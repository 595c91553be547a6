"""What a call changes in a module, and puts back, one thread at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice, product
from operator import is_, itemgetter
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from gradkit._compat.autograd import named_thread
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit.errors import UnsupportedGraphError, message

_LONGEST_WAIT = 600.0  # seconds


class _Block:
    """A block of one thread in which modules are its own."""

    def __init__(self, modules: Sequence[nn.Module], thread: int) -> None:
        self.modules = modules
        # In a backward pass, the thread that waits for it: what that uses is the pass's to use.
        self.thread = thread
        self.ended = Event()
        self.waits_for: _Block | None = None

    def shares_with(self, other: _Block) -> bool:
        """Return whether some module is a part of both."""
        pairs = product(self.modules, other.modules)
        return any(not set(a.modules()).isdisjoint(b.modules()) for a, b in pairs)


# In the order in which they began. One that is not the first waits for those before it; appending
# and removing need no lock.
_blocks: list[_Block] = []


@contextmanager
def alone_with(*modules: nn.Module) -> Iterator[None]:
    """Let no other thread into such a block with these modules; raise where both would wait."""
    if torch.compiler.is_compiling() or not modules:
        yield
        return
    with named_thread() as thread, INSIDE:
        block = _Block(modules, thread)

        def end() -> None:
            if block in _blocks:
                _blocks.remove(block)
            block.ended.set()

        with undone(end):
            _blocks.append(block)
            while len(_blocks) > 1 and (other := _blocking(block)):
                _wait(block, other)
            yield


def _blocking(block: _Block) -> _Block | None:
    """Return a block of another thread that has to end before this one begins, if there is one."""
    before = list(_blocks)
    before = before[: before.index(block)]
    for index, other in enumerate(before):
        if other.thread == block.thread or not other.shares_with(block):
            continue
        # One that waits for a block around this one, of this thread, has not begun.
        around = (one for one in before[:index] if one.thread == block.thread)
        if not any(one.shares_with(other) for one in around):
            return other
    return None


def _wait(block: _Block, other: _Block) -> None:
    block.waits_for = other
    if _wait_for_each_other(block) or not other.ended.wait(_LONGEST_WAIT):
        names = " and ".join(sorted({type(module).__name__ for module in block.modules}))
        expected = "a module, and parts of it, that no other thread uses, or not for long"
        got = f"{names} in a call of another thread, which waits for this one, or has not returned "
        got += f"for {_LONGEST_WAIT:.0f} seconds"
        fix = "copy.deepcopy(module) for each thread; or call modules that share parts in one order"
        raise UnsupportedGraphError(message("module", expected, got, fix))
    block.waits_for = None


def _wait_for_each_other(block: _Block) -> bool:
    """Return whether the thread that a block waits for waits, in the end, for its own thread."""
    seen: set[int] = set()
    waiting: _Block | None = block
    # One that has ended is still there until the thread that waits for it runs again.
    while waiting and (other := waiting.waits_for) and not other.ended.is_set():
        if other.thread == block.thread:
            return True
        if other.thread in seen:
            return False
        seen.add(other.thread)
        of_thread = (one for one in list(_blocks) if one.thread == other.thread)
        waiting = next((one for one in of_thread if one.waits_for), None)
    return False


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

    def changed_attributes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the tables, and keys there, of attributes that are other objects now."""
        for attributes, copy in self._attributes:
            for name, value in attributes.items():
                if copy.get(name) is not value:
                    yield attributes, name

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
    """Put a module's attributes and containers back, its hooks too if asked; yield its parts."""
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


@contextmanager
def modules_put_back(modules: Sequence[nn.Module], *, hooks: bool = False) -> Iterator[None]:
    """Put back what a block assigns to modules, none of which another thread runs meanwhile."""
    with undo_stack() as stack:
        stack.enter_context(alone_with(*modules))
        for module in modules:
            stack.enter_context(attributes_put_back(module, hooks=hooks))
        yield


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
