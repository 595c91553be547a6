"""Writes on tensors that a function shares with its caller, done on copies of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import batched_like, is_writable, memory_of, without_ended_levels
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message

Kwargs: TypeAlias = dict[str, Any]

_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
_NO_WRITES = frozenset({"requires_grad_", "share_memory_"})
# The place of the running statistics in the arguments, and the flag with which they are written.
_STATISTICS: dict[Any, tuple[int, str, bool]] = {
    functional.batch_norm: (1, "training", False),
    functional.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", True),
    torch.native_batch_norm: (3, "training", False),
}
_FLAG = 5  # the flag's position in all of them


class CopyOnWrite:
    """Redirects writes on shared tensors to copies, which are read in their stead from then on."""

    # A copy is batched if the operands are: in a vmap over tasks each task has one of its own, as
    # each has in a loop that starts every task from the same module.

    def __init__(self, is_shared: Callable[[Tensor], bool]) -> None:
        self._may_be_shared = is_shared
        # A tensor that was written on, which must stay alive, and its copy, by memory.
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}
        self._own: set[int] = set()  # the storages of copies
        self._outdated: dict[int, Tensor] = {}  # the tensors that a copy has replaced, by storage

    def redirects(self, func: Callable[..., Any], kwargs: Kwargs | None) -> bool:
        """Return whether an operation may write on a tensor."""
        if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace") is True):
            return True
        return may_write(func)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an operation on the copies."""
        if not (self._copies or self.redirects(func, kwargs)):
            return func(*args, **kwargs) if kwargs else func(*args)
        out = kwargs.get("out")
        if out is not None and any(map(self._is_shared, tensors_in((out,)))):
            return self._run_out(func, args, {**kwargs})
        targets = list(filter(self._is_shared, written(func, args, kwargs)))
        operands = [self.value(x) for x in tensors_in((*args, *kwargs.values()))]
        for tensor in targets:
            # autograd saves the values of statistics.
            self._make_writable(tensor, operands, anew=func in _STATISTICS)
        result = func(*self.current(args), **self.current(kwargs))
        for tensor in targets:
            if result is self.value(tensor):
                return tensor  # also where it is assigned: module.buffer = buffer.add_(1)
        return result

    def _run_out(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an operation without its `out`, for which vmap has no rules."""
        out = kwargs.pop("out")
        result = func(*self.current(args), **self.current(kwargs))
        for tensor, new in zip(tensors_in((out,)), tensors_in((result,)), strict=True):
            self._make_writable(tensor, [new])
            self.value(tensor).copy_(new)
        return out

    def _make_writable(self, tensor: Tensor, operands: list[Tensor], *, anew: bool = False) -> None:
        """Give a tensor a copy, unless it has one that can be written on: its views show that."""
        copy = self.value(tensor)
        if copy is tensor or anew or not is_writable(copy, operands):
            with torch.enable_grad(), INSIDE:  # a write under no_grad leaves a tensor its graph
                new = batched_like(copy.clone(), operands)
            self._outdated[memory_of(copy)[0]] = copy
            self._copies[memory_of(tensor)] = tensor, new
            self._own.add(memory_of(new)[0])

    def _is_shared(self, tensor: Tensor) -> bool:
        return self._may_be_shared(tensor) and memory_of(tensor)[0] not in self._own

    def value(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor that was written on, and any other as it is."""
        if not self._copies:
            return tensor
        key = memory_of(tensor)
        if key in self._copies:
            return without_ended_levels(self._copies[key][1])
        if key[0] in self._outdated:
            expected = "a function that writes on tensors from outside, such as buffers, as a whole"
            got = "one that reads and writes parts of one by views"
            fix = "write on a copy: x = buffer.clone()"
            raise UnsupportedGraphError(message("fn", expected, got, fix))
        return tensor

    def values(self, tree: PyTree) -> PyTree:
        """Return a tree with the copies in it."""
        return pytree.map_tensors(self.value, tree) if self._copies else tree

    def current(self, value: Any) -> Any:
        """Return an argument, or several in lists, with the copies in it."""
        if not self._copies:
            return value
        if isinstance(value, Tensor):
            return self.value(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.current, value))
        if type(value) is dict:
            return {key: self.current(part) for key, part in value.items()}
        return value


class CopyOnWriteMode(TorchFunctionMode):
    """Redirects the writes of a block."""

    def __init__(self, writes: CopyOnWrite) -> None:
        super().__init__()
        self.writes = writes

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on the copies."""
        return self.writes.run(func, args, kwargs or {})


def written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation writes on, but for `out`."""
    if func in _STATISTICS:
        position, flag, default = _STATISTICS[func]
        if not _argument(args, kwargs, _FLAG, flag, default):
            return []
        names = "running_mean", "running_var"
        return tensors_in(
            _argument(args, kwargs, position + i, name, None) for i, name in enumerate(names)
        )
    if not (may_write(func) or kwargs.get("inplace") is True):
        return []
    first = args[0] if args else next(iter(kwargs.values()), None)
    return tensors_in(first if isinstance(first, list | tuple) else (first,))


@lru_cache(maxsize=4096)
def may_write(func: Callable[..., Any]) -> bool:
    """Return whether an operation writes on its first argument, or on statistics."""
    return func in _STATISTICS or is_in_place(getattr(func, "__name__", ""))


def is_in_place(name: str) -> bool:
    """Return whether an operation of this name writes on its first argument."""
    if name in _NO_WRITES or not name.endswith("_"):
        return False
    return name in _WRITES or not name.endswith("__")


def _argument(args: tuple[Any, ...], kwargs: Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values, and in the lists among them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) in (list, tuple):
            tensors += tensors_in(value)
    return tensors
