"""Reads of what a module has kept from a pass with other parameters: a cache would be a constant."""

# Apart from the modules' state, which needs no graphs.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import is_of_ended_transform, varies
from gradkit._core import pytree
from gradkit._core.graph import Subgraph
from gradkit._state.copy_on_write import tensors_in
from gradkit._state.module_state import KeptState, ModuleSnapshot
from gradkit.errors import UnsupportedGraphError, message

_Kept: TypeAlias = Mapping[int, tuple[str, Tensor]]  # by id: the path of a tensor, and itself


class _StaleReads(TorchFunctionMode):
    """Raises at operations that read the values of some tensors."""

    def __init__(self, kept: _Kept, is_stale: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._kept, self._is_stale = kept, is_stale

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it reads what is stale."""
        kwargs = kwargs or {}
        read = [x for x in tensors_in((*args, *kwargs.values())) if id(x) in self._kept]
        result = func(*args, **kwargs)
        if read and not _reads_no_value(func) and pytree.tensors(result):
            for tensor in filter(self._is_stale, read):
                raise UnsupportedGraphError(_stale(self._kept[id(tensor)][0]))
        return result


def _reads_no_value(func: Any) -> bool:
    """Return whether an operation cuts the graph on purpose, or reads a shape alone."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith(("detach", "new_")) or func is _DATA


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def _stale(path: str) -> str:
    expected = "a module that computes with the parameters that the call was given"
    got = "a tensor that it has kept from a pass with other parameters, and reads: its gradient "
    got += "would be lost"
    name = path.partition(".")[2]
    fix = f"reset it before the call: module.{name} = None; or cut the graph where it is kept, "
    fix += "with detach()"
    return message(path, expected, got, fix)


def stale_reads_refused(
    snapshots: Iterable[ModuleSnapshot],
) -> AbstractContextManager[object]:
    """Return what raises where a module reads what an earlier pass has left, with other params."""
    every = list(snapshots)
    kept = {
        key: (path, x)
        for snapshot in every
        for key, (path, x) in snapshot.tensors.items()
        if _is_of_a_pass(x)
    }
    return _StaleReads(kept, partial(_was_replaced, every)) if kept else nullcontext()


def stale_reads_refused_in_call(
    state: KeptState, snapshot: ModuleSnapshot, given: list[Tensor]
) -> AbstractContextManager[object]:
    """Return the same for a call with given params, also of what other calls have left before."""

    def is_stale(tensor: Tensor) -> bool:
        made = state.made.get(id(tensor))
        if made is None:
            return _was_replaced([snapshot], tensor)
        return varies(tensor) and list(map(id, made[1])) != list(map(id, given))

    kept = {
        key: (path, x)
        for key, (path, x) in snapshot.tensors.items()
        if key in state.made or _is_of_a_pass(x)
    }
    return _StaleReads(kept, is_stale) if kept else nullcontext()


def _is_of_a_pass(tensor: Tensor) -> bool:
    return (tensor.requires_grad and not tensor.is_leaf) or is_of_ended_transform(tensor)


def _was_replaced(snapshots: list[ModuleSnapshot], tensor: Tensor) -> bool:
    """Return whether a tensor was made of a parameter in whose place another one is now."""
    replaced = {id(x) for one in snapshots for x in one.replaced_params()}
    if is_of_ended_transform(tensor):
        return bool(replaced) and tensor.requires_grad
    return not replaced.isdisjoint(Subgraph([tensor]).leaves)
