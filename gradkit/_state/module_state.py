"""What a call changes in a module, and puts back, one thread at a time."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import chain, islice, starmap
from operator import is_, itemgetter
from threading import Condition
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from gradkit._compat.autograd import named_thread
from gradkit._compat.transforms import (
    is_of_ended_transform,
    is_transform_tensor,
    transforms,
    without_ended_levels,
)
from gradkit._compat.undoing import INSIDE, undone
from gradkit._state import rng

# The blocks of the one thread whose turn it is, with its number. The engine's threads take the turn
# of the thread that waits for their pass, which a lock of the library would not let them.
_turns: list[tuple[int, object]] = []
_turns_changed = Condition()


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread into such a block."""
    # All modules share one lock: of two threads that call modules inside of modules, each could
    # wait for a lock that the other holds.
    if torch.compiler.is_compiling():
        yield
        return
    with named_thread() as thread, INSIDE:
        block = thread, object()
        try:
            try:
                with _turns_changed, INSIDE:
                    while _turns and _turns[0][0] != thread:
                        _turns_changed.wait()
                    _turns.append(block)
                yield
            finally:
                _end_turn(block)
        finally:  # again, as `undone` does it: an interrupt may have come in between
            if block in _turns:
                _end_turn(block)


def _end_turn(block: tuple[int, object]) -> None:
    with _turns_changed, INSIDE:
        if block in _turns:
            _turns.remove(block)
            if not _turns:
                _turns_changed.notify_all()


_OF_EVERY_MODULE = list(vars(nn.Module()))
_TORCHS = frozenset(_OF_EVERY_MODULE)
_HOOK_TABLES = [name for name in _OF_EVERY_MODULE if name.endswith("hooks")]
_TABLES = ["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"]
_CONTAINERS = frozenset({list, dict, OrderedDict, defaultdict, Counter, set, deque})
_LIBRARIES = frozenset({"torch", "numpy", "gradkit", "gradkit_parity", *sys.stdlib_module_names})
# Attributes of these types hold no state: a snapshot passes over them.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
_DEPTH, _LONGEST = 5, 10_000  # a longer container is data, and no state
LARGEST_STATE = 1 << 16  # elements of a tensor; a larger one is data, too

_Attributes: TypeAlias = list[tuple[str, Any]]
# The name of a part, its attributes, and what they were.
_Changed: TypeAlias = list[tuple[str, dict[str, Any], dict[str, Any]]]


@lru_cache(maxsize=4096)
def _kind(cls: type) -> type | None:
    """Return Tensor, a container's class, `object` for one of the user's, or None for others."""
    if issubclass(cls, Tensor):
        return Tensor
    if cls in _CONTAINERS or (issubclass(cls, tuple) and cls is not torch.Size):
        return cls
    is_users = cls is SimpleNamespace or cls.__module__.partition(".")[0] not in _LIBRARIES
    return object if is_users and not issubclass(cls, nn.Module | type) else None


def _reachable(attributes: _Attributes) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and the containers, in attributes, with their paths."""
    seen: set[int] = set()
    for _ in range(_DEPTH):
        below: _Attributes = []
        for path, value in attributes:
            cls: Any = type(value)
            kind = _kind(cls)
            if kind is None or id(value) in seen:
                continue
            seen.add(id(value))
            if kind is Tensor:
                yield path, value
                continue
            container = getattr(value, "__dict__", ()) if kind is object else value
            # A tuple's own methods: a subclass of a user's may lack a length (e3nn's Irreps).
            inner = [*tuple.__iter__(container)] if isinstance(container, tuple) else container
            if len(inner) > _LONGEST:
                continue
            yield path, container
            form = "{}.{}" if kind is object else "{}[{!r}]"
            pairs = inner.items() if isinstance(inner, dict) else enumerate(inner)
            below += [(form.format(path, key), x) for key, x in pairs]
        attributes = below


_KIND = ("dtype", "device", "shape")


class TensorState:
    """The values of some tensors, their memory, and whether they require grad."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [
            (
                x,
                x.data,
                _version(x),
                x.detach().clone() if type(x) in _OWN else _copy_of(x),
                x.is_leaf,
                x.requires_grad,
            )
            for x in tensors
        ]

    def restore(self, *, by_version: bool = False) -> None:
        """Put back what has changed; `by_version`, as far as torch has counted it."""
        for tensor, data, version, numbers, was_leaf, requires_grad in self._saved:
            if any(getattr(tensor, name) != getattr(data, name) for name in _KIND):
                tensor.data = data  # a module was moved or cast
            if numbers is not None and (
                _version(tensor) != version or not (by_version or _has_values(tensor, numbers))
            ):
                with torch.inference_mode(), INSIDE:  # inference tensors can be written on there
                    (tensor if tensor.is_inference() else data).copy_(numbers)
            if was_leaf and not (tensor.is_leaf or tensor._is_view()):
                tensor.detach_()  # a value with a graph was written on it
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written on them, as far as torch has counted it."""
        return all(_version(x) == version for x, _, version, *_ in self._saved)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no count


_OWN = (Tensor, nn.Parameter)


def _copy_of(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.detach().clone()
    except (RuntimeError, TypeError):  # a quantized weight, which knows few operations
        if tensor.requires_grad:
            raise
    return None


def _has_values(tensor: Tensor, numbers: Tensor) -> bool:
    is_comparable = tensor.layout == torch.strided and not tensor.is_meta
    return not is_comparable or torch.equal(tensor.detach(), numbers)


class ModuleSnapshot:
    """The attributes of a module, and what is in them; with `hooks`, its hooks, too."""

    def __init__(self, module: nn.Module, *, hooks: bool = False) -> None:
        self.module = module
        self.parts = list(module.named_modules())  # the module, all below, once, by first name
        self._own = [vars(part) for _, part in self.parts]
        self._copies = [*map(dict.copy, self._own)]
        self._values_before, self._last_before = _values_in(self._copies), _last_in(self._copies)
        self._tables = _Containers(self._own, _TABLES)
        self._hooks = _Containers(self._own, _HOOK_TABLES) if hooks else None
        own = list(self._own_attributes())
        self.generators = [x for _, x in own if type(x) is Generator]
        every = list(_reachable(own))
        self._kept = [(x, x.copy()) for _, x in every if not isinstance(x, Tensor | tuple)]
        self.has_containers = bool(self._kept)  # whose contents may change
        # The tensors in attributes that not every module has, by id, with their paths.
        self.tensors = {id(x): (path, x) for path, x in every if isinstance(x, Tensor)}
        is_plain = not (transforms() or rng.is_capturing())  # a copy would be of a transform
        values = (x for _, x in self.tensors.values() if is_plain and not is_transform_tensor(x))
        small = (x for x in values if x.numel() <= LARGEST_STATE and not x.requires_grad)
        self._values = TensorState(small)

    def _own_attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of the parts that not every module has, with their paths."""
        for (name, _), attributes in zip(self.parts, self._own, strict=True):
            own: dict[str, Any] = {}  # the last first
            for key in reversed(attributes):
                if key == _OF_EVERY_MODULE[-1]:
                    break
                own[key] = attributes[key]
            # A subclass's own come last if its constructor begins with that of nn.Module:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py#L482
            if len(own) + len(_OF_EVERY_MODULE) != len(attributes):
                own = {k: x for k, x in reversed(attributes.items()) if k not in _TORCHS}
            if not _PLAIN.issuperset(map(type, own.values())):
                prefix = f"module.{name}." if name else "module."
                yield from ((prefix + key, own[key]) for key in reversed(own))

    def new_attributes(
        self, changed: _Changed | None = None
    ) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the attributes that are other objects now: path, table and key."""
        for name, attributes, copy in self.changed() if changed is None else changed:
            prefix = f"module.{name}." if name else "module."
            new = [key for key, x in attributes.items() if copy.get(key) is not x]
            yield from ((prefix + key, attributes, key) for key in new)

    def new_buffers(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the buffers that are other objects now: table and key."""
        before = {id(table): copy for table, copy in self._tables.filled}
        for own in self._own:
            buffers, copy = own["_buffers"], before.get(id(own["_buffers"]), {})
            yield from ((buffers, key) for key, x in buffers.items() if copy.get(key) is not x)

    def changed(self) -> _Changed:
        """Return the names of those parts that have other attributes, these, and what they were."""
        now, before = _values_in(self._own), self._values_before
        is_same = len(now) == len(before) and all(map(is_, now, before))
        if is_same and _last_in(self._own) == self._last_before:  # as after most calls
            return []
        every = zip(self.parts, self._own, self._copies, strict=True)
        return [(name, x, y) for (name, _), x, y in every if not _is_same_table(x, y)]

    def now_in(self, table: str) -> list[Tensor]:
        """Return the tensors in a table of the parts."""
        values = chain.from_iterable([own[table].values() for own in self._own if own[table]])
        return [x for x in values if x is not None]

    def own(self) -> Iterator[Tensor]:
        """Yield the parameters, buffers and other tensors that it had."""
        yield from (x for _, x in self.tensors.values())
        for _, copy in self._tables.filled:
            values = copy.values() if isinstance(copy, dict) else ()
            yield from (x for x in values if isinstance(x, Tensor))

    def is_still_right(self) -> bool:
        """Return whether all is as it was, but for hooks: another snapshot would say the same."""
        return (
            not self.changed()
            and self._tables.are_same()
            and all(_is_same(*pair) for pair in self._kept)
            and self._values.is_unchanged()
        )

    def tensors_now(self) -> dict[int, tuple[str, Tensor]]:
        """Return the tensors that are in attributes now, as `tensors`."""
        now = _reachable(list(self._own_attributes()))
        return {id(x): (path, x) for path, x in now if isinstance(x, Tensor)}

    def replaced_params(self) -> Iterator[Tensor]:
        """Yield the parameters in whose place the parts have others now."""
        before = {id(table): copy for table, copy in self._tables.filled}
        for own, copy in zip(self._own, self._copies, strict=True):
            now, params = own["_parameters"], before.get(id(copy["_parameters"]), {})
            yield from (x for k, x in params.items() if x is not None and now.get(k) is not x)

    @contextmanager
    def of_call(self) -> Iterator[_Changed]:
        """Put back what torch keeps in modules after a block, and the rest, too, if it raises."""
        # After a block that does not raise, the list that it got has the parts whose attributes it
        # has changed, which stay so.
        is_restored, changed = False, list[Any]()
        try:
            try:
                yield changed
            except BaseException:
                self.restore_kept()
                raise
            finally:
                changed[:] = self._restore_tables()
                is_restored = True
        finally:  # again, as `undone` does it: an interrupt may have come in between
            if not is_restored:
                self._restore_tables()

    def restore(self) -> None:
        """Put back all that has changed."""
        for _, attributes, copy in self.changed():
            _restore(attributes, copy)
        self._restore_tables()
        if self._hooks is not None:
            self._hooks.restore()
        self.restore_kept()

    def _restore_tables(self) -> _Changed:
        """Put back what torch keeps in every module: parameters, buffers, parts, the mode."""
        changed = self.changed()
        for _, attributes, copy in changed:
            attributes.update({name: copy[name] for name in _OF_EVERY_MODULE if name in copy})
        self._tables.restore()
        return changed

    def restore_kept(self) -> None:
        """Put back what else is in attributes."""
        for _, attributes, copy in self.changed():
            own = {name: x for name, x in attributes.items() if name in _TORCHS}
            _restore(attributes, copy | own)
        for container, copy in self._kept:
            _restore(container, copy)
        self._values.restore(by_version=True)  # a device need not be waited for
        for buffers in filter(None, [own["_buffers"] for own in self._own]):
            ended = [k for k, x in buffers.items() if x is not None and is_of_ended_transform(x)]
            buffers.update({key: without_ended_levels(buffers[key]) for key in ended})


def _values_in(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, tables))]


def _last_in(tables: Iterable[dict[str, Any]]) -> list[str]:
    """Return the last key of each table: a value that got another name is there."""
    return [*map(next, map(reversed, tables))]


class _Containers:
    """The tables of these names in the attributes of some modules, and what they hold."""

    def __init__(self, attributes: Iterable[dict[str, Any]], names: Sequence[str]) -> None:
        try:
            tables = [*chain.from_iterable(map(itemgetter(*names), attributes))]
        except KeyError:  # a module without all of them: one that was pickled by an older torch
            tables = [own[name] for own in attributes for name in names if name in own]
        if not _CONTAINERS.issuperset(map(type, tables)):
            tables = [x for x in tables if type(x) in _CONTAINERS]
        self._tables = tables
        self.filled = [(x, x.copy()) for x in filter(None, tables)]

    def are_same(self) -> bool:
        """Return whether each holds what it held."""
        now = [*filter(None, self._tables)]
        return len(now) == len(self.filled) and all(starmap(_is_same, self.filled))

    def restore(self) -> None:
        """Put back what has changed."""
        for container, copy in self.filled:
            if not _is_same(container, copy):
                _restore(container, copy)
        if len(now := [*filter(None, self._tables)]) > len(self.filled):
            filled = {id(container) for container, _ in self.filled}
            for container in now:
                if id(container) not in filled:
                    container.clear()


def _is_same_table(now: dict[str, Any], copy: dict[str, Any]) -> bool:
    return list(now) == list(copy) and all(map(is_, now.values(), copy.values()))


def _restore(container: Any, copy: Any) -> None:
    """Give a container the objects that it had, in their order."""
    # A dict with the same keys keeps its size, and is never empty: the caller, or another thread,
    # may be iterating over it.
    if isinstance(container, dict) and list(islice(container, len(copy))) == list(copy):
        container.update(copy)
        for key in list(islice(container, len(copy), None)):
            del container[key]
    elif isinstance(container, dict) or not _is_same(container, copy):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(copy)


def _is_same(container: Any, copy: Any) -> bool:
    if isinstance(container, dict):
        if not all(map(is_, container.values(), copy.values())):
            return False
    elif isinstance(container, set):
        return bool(container == copy)
    return len(container) == len(copy) and all(map(is_, container, copy))


_Restore: TypeAlias = Callable[[ModuleSnapshot], None]
Made: TypeAlias = dict[int, tuple[Tensor, list[Tensor]]]  # by id


class KeptState:
    """What modules keep in attributes during a call of gradkit, until it ends."""

    def __init__(self, end: ExitStack, restore: _Restore) -> None:
        self._end, self._restore = end, restore
        self.snapshots: dict[int, ModuleSnapshot] = {}  # by id of a module
        # The tensors that calls of a module have left, and the parameters of these, by its id.
        self.made: dict[int, Made] = {}
        self.replaced: set[int] = set()  # the ids of parameters that calls had others for
        # The state of modules before a checkpoint has put other tensors into them.
        self.before: dict[int, ModuleSnapshot] = {}
        self._left: set[tuple[int, str]] = set()  # buffers, which are put back at the end

    def add(self, module: nn.Module, *, hooks: bool = False) -> ModuleSnapshot | None:
        """Put back a module at the end; return its snapshot, None if it has one already."""
        if id(module) in self.snapshots:
            return None  # the state is that of the outermost call's begin
        self._end.enter_context(alone())
        before = self.before.get(id(module))
        snapshot = before or ModuleSnapshot(module, hooks=hooks)
        self.snapshots[id(module)] = snapshot
        self._end.enter_context(undone(partial(self._restore, snapshot)))
        return None if before else snapshot

    def snapshot_of(self, module: nn.Module) -> ModuleSnapshot:
        """Return a snapshot of a module as it is now, which is put back at the end."""
        new = self.add(module)
        if new is not None:
            return new
        known = self.snapshots[id(module)]
        return known if known.is_still_right() else ModuleSnapshot(module)

    def note(self, snapshot: ModuleSnapshot, params: list[Tensor], changed: _Changed) -> None:
        """Note what a call with these parameters has left in a module; forget what is gone."""
        before, key = snapshot.tensors, id(snapshot.module)
        made = self.made.get(key, {})
        if not (changed or made or snapshot.has_containers):
            return
        now = snapshot.tensors_now()
        left = {k: (x, params) for k, (_, x) in now.items() if k not in before}
        self.made[key] = left | {k: made[k] for k in made.keys() & now.keys()}

    def leave(self, module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        """Let a module keep the buffers that a call has assigned, as it keeps attributes."""
        for name, value in buffers.items():
            path, _, key = name.rpartition(".")
            table = module.get_submodule(path)._buffers
            if (id(table), key) not in self._left:  # leftovers of the calls in between can be freed
                self._left.add((id(table), key))
                self._end.enter_context(undone(partial(table.__setitem__, key, table[key])))
            table[key] = value

    def put_back(self) -> None:
        """Let the modules keep what they did before the call."""
        for snapshot in reversed(self.snapshots.values()):
            snapshot.restore_kept()
        self.made.clear()


_state_now: ContextVar[KeptState | None] = ContextVar("state_now", default=None)


def state_now() -> KeptState | None:
    """Return what the outermost call of gradkit lets modules keep, if one is around."""
    return None if torch.compiler.is_compiling() else _state_now.get()


def keeping_state() -> AbstractContextManager[KeptState]:
    """Return a block at whose end modules lose what they have kept, if it is the outermost."""
    outer = _state_now.get()
    return _new_state(ModuleSnapshot.restore_kept) if outer is None else nullcontext(outer)


@contextmanager
def _new_state(restore: _Restore) -> Iterator[KeptState]:
    outer, end = _state_now.get(), ExitStack()
    state = KeptState(end, restore)
    if outer is not None:
        state.replaced = outer.replaced
    try:
        try:
            _state_now.set(state)
            yield state
        finally:
            _state_now.set(outer)
            end.close()
    finally:  # again, as `undone` does it: an interrupt may have come in between
        _state_now.set(outer)
        end.close()


@contextmanager
def modules_put_back(modules: Sequence[nn.Module], *, hooks: bool = False) -> Iterator[None]:
    """Put back all that a block assigns to modules, none of which another thread runs meanwhile."""
    # A module would keep what a forward pass computes from the tensors of a call: a weight that a
    # hook makes, a cache. And in a module that is part of another under two names,
    # torch.func.functional_call leaves the tensors of the call as its parameters:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/stateless.py#L99
    if torch.compiler.is_compiling():  # a trace rejects assignments that it cannot undo itself
        yield
        return
    with _new_state(ModuleSnapshot.restore) as state:
        for module in modules:
            state.add(module, hooks=hooks)
        yield


class TensorSlots:
    """Where the parameters and buffers of a module stand, to be replaced by other tensors."""

    # A single walk finds all that torch.func.functional_call looks up by name, tensor by tensor.

    def __init__(self, parts: Sequence[tuple[str, nn.Module]]) -> None:
        # A tensor of the module's own, its table, its key there, and its name.
        self._slots: list[tuple[Tensor, dict[str, Any], str, str]] = []
        self._buffers: list[tuple[str, nn.Module, str]] = []  # a name, the part, and the key there
        self._fit = True
        for prefix, part in parts:
            parameters, buffers = part._parameters, part._buffers
            self._fit &= isinstance(parameters, dict)  # not so where torch.jit keeps the tensors
            if not (parameters or buffers):
                continue
            before = f"{prefix}." if prefix else ""
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
