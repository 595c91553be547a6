"""Writes on tensors that a function shares with its caller, done on copies of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import batched_like, memory_of
from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, message

_Kwargs: TypeAlias = dict[str, Any]

_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
_NO_WRITES = frozenset({"requires_grad_", "share_memory_"})
# Where the running statistics are among the arguments, and the flag with which they are written.
_STATISTICS: dict[Any, tuple[int, str, bool]] = {
    functional.batch_norm: (1, "training", False),
    functional.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", True),
    torch.native_batch_norm: (3, "training", False),
}
_FLAG = 5  # its position in all of them


class LocalWrites(TorchFunctionMode):
    """Redirects writes on shared tensors to copies, which are read in their stead from then on.

    Where the operands are batched, so is a copy: in a vmap over tasks each has one of its own, as
    each has in a loop that starts every task from the same module.
    """

    def __init__(self, is_shared: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_shared = is_shared
        # By memory: a tensor that was written on, which must stay alive, and its copy.
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}
        self._storages: set[int] = set()  # in which those tensors are

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: _Kwargs | None = None,
    ) -> Any:
        """Run the operation on the copies."""
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if out is not None and any(map(self._is_shared, _tensors((out,)))):
            return self._run_out(func, args, {**kwargs})
        written = list(filter(self._is_shared, written_by(func, args, kwargs)))
        for tensor in written:
            copy = self.value(tensor).clone()
            self._set(tensor, batched_like(copy, _tensors((*args, *kwargs.values()))))
        if not self._copies:
            return self.run(func, args, kwargs)
        result = self.run(func, self._current(args), self._current(kwargs))
        for tensor in written:
            if result is self.value(tensor):
                return tensor  # also where it is assigned: module.buffer = buffer.add_(1)
        return result

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        """Run an operation; for subclasses to override."""
        return func(*args, **kwargs)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor that was written on, and any other as it is."""
        if not self._copies:
            return tensor
        key = memory_of(tensor)
        if key in self._copies:
            return self._copies[key][1]
        if key[0] in self._storages:
            expected = "a function that writes on tensors from outside, such as buffers, as a whole"
            got = "one that reads and writes parts of one by views"
            fix = "write on a copy: x = buffer.clone()"
            raise UnsupportedGraphError(message("fn", expected, got, fix))
        return tensor

    def values(self, tree: PyTree) -> PyTree:
        """Return a tree with the copies in it."""
        if not self._copies:
            return tree
        leaves, spec = pytree.flatten(tree)
        return pytree.unflatten(spec, [self._current(leaf) for leaf in leaves])

    def _current(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.value(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._current, value))
        if type(value) is dict:
            return {key: self._current(part) for key, part in value.items()}
        return value

    def _set(self, tensor: Tensor, copy: Tensor) -> None:
        key = memory_of(tensor)
        self._storages.add(key[0])
        self._copies[key] = tensor, copy

    def _run_out(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
        """Run an operation without its `out`, for which vmap has no rules."""
        out = kwargs.pop("out")
        result = self.run(func, self._current(args), self._current(kwargs))
        for tensor, new in zip(_tensors((out,)), _tensors((result,)), strict=True):
            self._set(tensor, new.to(tensor.dtype))
        return out


def written_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: _Kwargs) -> list[Tensor]:
    """Return the tensors that an operation writes on, but for `out`."""
    if func in _STATISTICS:
        position, flag, default = _STATISTICS[func]
        if not _argument(args, kwargs, _FLAG, flag, default):
            return []
        names = "running_mean", "running_var"
        return _tensors(
            _argument(args, kwargs, position + i, name, None) for i, name in enumerate(names)
        )
    if not is_in_place(getattr(func, "__name__", "")) and kwargs.get("inplace") is not True:
        return []
    first = args[0] if args else next(iter(kwargs.values()), None)
    return _tensors(first if isinstance(first, list | tuple) else (first,))


def is_in_place(name: str) -> bool:
    """Return whether an operation of this name writes on its first argument."""
    if name in _NO_WRITES or not name.endswith("_"):
        return False
    return name in _WRITES or not name.endswith("__")


def _argument(args: tuple[Any, ...], kwargs: _Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among some values, and in the lists among them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) in (list, tuple):
            tensors += _tensors(value)
    return tensors
