"""What a call changes in a module, and puts back, one thread at a time."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain, islice
from operator import is_
from threading import Condition
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit._compat.autograd import calling_thread
from gradkit._compat.transforms import is_transform_tensor, transforms
from gradkit._compat.undoing import undo_stack, undone
from gradkit._state import rng
from gradkit._state.tensor_state import TensorState

# The blocks of the one thread whose turn it is, with its number. The engine's threads take the turn
# of the thread that waits for their pass, which a lock of the library would not let them.
_turns: list[tuple[int, object]] = []
_turn_has_changed = Condition()


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread into such a block."""
    # One turn for all modules: of two threads that call modules inside of modules, each could wait
    # for a lock that the other holds.
    if torch.compiler.is_compiling():
        yield
        return
    block = calling_thread(), object()

    def end() -> None:
        with _turn_has_changed:
            if block in _turns:
                _turns.remove(block)
            _turn_has_changed.notify_all()

    with undone(end):
        with _turn_has_changed:
            _turn_has_changed.wait_for(lambda: all(one[0] == block[0] for one in _turns))
            _turns.append(block)
        yield


_OF_EVERY_MODULE = list(vars(nn.Module()))
_TORCHS = frozenset(_OF_EVERY_MODULE)
_HOOK_TABLES = [name for name in _OF_EVERY_MODULE if name.endswith("hooks")]
_LAST = len(_OF_EVERY_MODULE) - 1
_TABLES = ["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"]
_CONTAINERS = frozenset({list, dict, OrderedDict, defaultdict, Counter, set, deque})
_DEPTH, _LONGEST = 5, 10_000  # what is longer is data, and no state
LARGEST_STATE = 1 << 16  # elements of a tensor; a larger one is data, too

Attributes: TypeAlias = list[tuple[str, Any]]
Restored: TypeAlias = list[tuple[Any, Any]]  # a container, and a copy of it


def _own_attributes(attributes: dict[str, Any]) -> Attributes:
    """Return the attributes of a part that not every module has."""
    # As long as its constructor begins with that of nn.Module, its own attributes come last.
    if next(islice(attributes, _LAST, None), None) == _OF_EVERY_MODULE[_LAST]:
        return list(islice(attributes.items(), _LAST + 1, None))
    return [(name, x) for name, x in attributes.items() if name not in _TORCHS]


def _reachable(part: str, attributes: Attributes) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and the containers, in attributes of a part, with their paths."""
    seen: set[int] = set()
    prefix = f"module.{part}." if part else "module."
    level = [(prefix + name, x) for name, x in attributes if _kind(type(x)) is not None]
    for _ in range(_DEPTH):
        below: Attributes = []
        for path, value in level:
            kind = _kind(type(value))
            if kind is None or id(value) in seen:
                continue
            seen.add(id(value))
            if kind is Tensor:
                yield path, value
                continue
            container = vars(value) if kind is object else value
            if len(container) > _LONGEST:
                continue
            yield path, container
            if isinstance(container, dict):
                form = "{}.{}" if kind is object else "{}[{!r}]"
                below += [(form.format(path, key), x) for key, x in container.items()]
            else:
                below += [(f"{path}[{index}]", x) for index, x in enumerate(container)]
        level = below


_LIBRARIES = frozenset({"torch", "numpy", "gradkit", *sys.stdlib_module_names})


@lru_cache(maxsize=4096)
def _kind(cls: type) -> type | None:
    """Return Tensor, a container's class, `object` for one of the user's, or None for others."""
    if issubclass(cls, Tensor):
        return Tensor
    if cls in _CONTAINERS or (issubclass(cls, tuple) and cls is not torch.Size):
        return cls
    is_state = cls is SimpleNamespace or cls.__module__.partition(".")[0] not in _LIBRARIES
    has_attributes = cls.__dictoffset__ and not issubclass(cls, nn.Module | type)
    return object if is_state and has_attributes else None


class ModuleSnapshot:
    """The attributes of a module, and what is in them; with `hooks`, its hooks, too."""

    def __init__(self, module: nn.Module, *, hooks: bool = False) -> None:
        self.module = module
        self.parts = list(module.named_modules())  # it and all below, once, by the first name
        self._attributes: Restored = []
        self._tables: Restored = []  # torch's own
        self._kept: Restored = []  # those in other attributes
        self.tensors: dict[int, tuple[str, Tensor]] = {}  # in those attributes, with their paths
        names = _TABLES + _HOOK_TABLES if hooks else _TABLES
        for name, part in self.parts:
            attributes = vars(part)
            self._attributes.append((attributes, attributes.copy()))
            tables = [attributes[name] for name in names if name in attributes]
            self._tables += [(x, x.copy()) for x in tables if type(x) in _CONTAINERS]
            own = _own_attributes(attributes)
            if own:
                self._add(name, own)
        # In a transform, a copy would be of its level.
        is_plain = not (transforms() or rng.is_capturing())
        every = (x for _, x in self.tensors.values() if is_plain and not is_transform_tensor(x))
        small = (x for x in every if x.numel() <= LARGEST_STATE and not x.requires_grad)
        self._values = TensorState(small)

    def _add(self, name: str, attributes: Attributes) -> None:
        for path, value in _reachable(name, attributes):
            if isinstance(value, Tensor):
                self.tensors.setdefault(id(value), (path, value))
            elif not isinstance(value, tuple):
                self._kept.append((value, value.copy()))

    def kept_now(self) -> dict[int, tuple[str, Tensor]]:
        """Return the tensors that are in attributes of the parts now, and were not before."""
        now: dict[int, tuple[str, Tensor]] = {}
        for name, part in self.parts:
            for path, value in _reachable(name, _own_attributes(vars(part))):
                if isinstance(value, Tensor) and id(value) not in self.tensors:
                    now[id(value)] = path, value
        return now

    def changed_attributes(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the tables, and keys there, of attributes that are other objects now."""
        for attributes, copy in self._attributes:
            for name, value in attributes.items():
                if copy.get(name) is not value:
                    yield attributes, name

    def new_attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the parts that are other objects now, with their paths."""
        for (name, part), (_, copy) in zip(self.parts, self._attributes, strict=True):
            attributes = vars(part)
            if not _is_same_table(attributes, copy):
                prefix = f"module.{name}." if name else "module."
                own = _own_attributes(attributes)
                yield from ((prefix + key, x) for key, x in own if copy.get(key) is not x)

    def replaced_params(self) -> Iterator[Tensor]:
        """Yield the parameters in whose place the parts have others now."""
        tables = [(attributes["_parameters"], id(copy["_parameters"])) for attributes, copy in self._attributes]
        before = {id(table): copy for table, copy in self._tables}
        for table, key in tables:
            for name, x in before.get(key, {}).items():
                if x is not None and table.get(name) is not x:
                    yield x

    @contextmanager
    def call(self) -> Iterator[None]:
        """Put back what torch keeps in modules after a block, and the rest, too, if it raises."""
        with undone(self.restore_tables):
            try:
                yield
            except BaseException:
                self.restore_kept()
                raise

    def restore(self) -> None:
        """Put back all that has changed."""
        for container, copy in chain(self._attributes, self._tables):
            _restore(container, copy)
        self.restore_kept()

    def restore_tables(self) -> None:
        """Put back what torch keeps in every module: parameters, buffers, parts, the mode."""
        for attributes, copy in self._attributes:
            if not all(map(is_, islice(attributes.values(), _LAST + 1), copy.values())):
                attributes.update({name: copy[name] for name in _OF_EVERY_MODULE if name in copy})
        for container, copy in self._tables:
            _restore(container, copy)

    def restore_kept(self) -> None:
        """Put back what else is in attributes."""
        for attributes, copy in self._attributes:
            if not _is_same_table(attributes, copy):
                own = {name: x for name, x in attributes.items() if name in _TORCHS}
                _restore(attributes, copy | own)
        for container, copy in self._kept:
            _restore(container, copy)
        self._values.restore(by_version=True)  # a device need not be waited for


def _is_same_table(now: dict[str, Any], copy: dict[str, Any]) -> bool:
    return len(now) == len(copy) and all(map(is_, now.values(), copy.values()))


def _restore(container: Any, copy: Any) -> None:
    """Give a container the objects that it had, in their order."""
    # One with the same keys keeps its size, and is never empty: the caller, or another thread, may
    # be iterating over it.
    if isinstance(container, dict) and list(islice(container, len(copy))) == list(copy):
        if not all(map(is_, container.values(), copy.values())):
            container.update(copy)
        for key in list(islice(container, len(copy), None)):
            del container[key]
    elif not isinstance(container, dict) and _is_same(container, copy):
        return
    else:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(copy)


def _is_same(container: Any, copy: Any) -> bool:
    if isinstance(container, set):
        return bool(container == copy)
    return len(container) == len(copy) and all(map(is_, container, copy))


class KeptState:
    """What modules keep in attributes during a call of gradkit, until it ends."""

    def __init__(self, end: ExitStack, restore: Callable[[ModuleSnapshot], None]) -> None:
        self._end, self._restore = end, restore
        self.snapshots: dict[int, ModuleSnapshot] = {}  # by id of a module
        # Tensors that calls of modules have left, with the parameters that they were made with.
        self.made: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def add(self, module: nn.Module, *, hooks: bool = False) -> ModuleSnapshot | None:
        """Put back a module at the end; return its snapshot, None if it has one already."""
        if id(module) in self.snapshots:
            return None
        self._end.enter_context(alone())
        snapshot = ModuleSnapshot(module, hooks=hooks)
        self.snapshots[id(module)] = snapshot
        self._end.enter_context(undone(partial(self._restore, snapshot)))
        return snapshot

    def note(self, snapshot: ModuleSnapshot, given: list[Tensor]) -> None:
        """Note which tensors a call with these parameters has left."""
        self.made |= {key: (x, given) for key, (_, x) in snapshot.kept_now().items()}

    def kept_now(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that modules keep now, and did not before, with their paths."""
        for snapshot in self.snapshots.values():
            yield from snapshot.kept_now().values()

    def put_back(self) -> None:
        """Let the modules keep what they did before the call."""
        for snapshot in reversed(self.snapshots.values()):
            snapshot.restore_kept()
        self.made.clear()


_state_now: ContextVar[KeptState | None] = ContextVar("state_now", default=None)


@contextmanager
def keeping_state(
    *modules: nn.Module, restore: Callable[[ModuleSnapshot], None] = ModuleSnapshot.restore_kept
) -> Iterator[KeptState]:
    """Let modules keep what they assign to attributes until the outermost such block ends."""
    outer = _state_now.get()
    if outer is not None:
        for module in modules:
            outer.add(module)
        yield outer
        return
    with _new_state(restore) as state:
        for module in modules:
            state.add(module)
        yield state


@contextmanager
def _new_state(restore: Callable[[ModuleSnapshot], None]) -> Iterator[KeptState]:
    before = _state_now.get()
    with undo_stack() as end, undone(partial(_state_now.set, before)):
        state = KeptState(end, restore)
        _state_now.set(state)
        yield state


def state_now() -> KeptState | None:
    """Return what the outermost call of gradkit lets modules keep, if one is around."""
    return None if torch.compiler.is_compiling() else _state_now.get()


@contextmanager
def modules_put_back(modules: Sequence[nn.Module], *, hooks: bool = False) -> Iterator[None]:
    """Put back all that a block assigns to modules, none of which another thread runs meanwhile."""
    # Otherwise what a forward pass computes from the tensors of a call would stay in the module: a
    # weight that a hook makes, a cache. And in a module that is part of another under two names,
    # torch.func.functional_call leaves the tensors of the call as its parameters.
    if torch.compiler.is_compiling():  # it rejects assignments that it cannot undo itself
        yield
        return
    with _new_state(ModuleSnapshot.restore) as state:
        for module in modules:
            state.add(module, hooks=hooks)
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
