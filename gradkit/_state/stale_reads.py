"""Reads of what a module has kept from a pass with other parameters: constants, silently."""

# The modules' state needs no graphs: it has a file of its own.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import is_not
from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.transforms import is_of_ended_transform, varies
from gradkit._compat.undoing import INSIDE
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
        read = [id(x) for x in tensors_in((*args, *kwargs.values())) if id(x) in self._kept]
        result = func(*args, **kwargs)
        if read and not _reads_no_value(func) and pytree.tensors(result):
            for path, tensor in map(self._kept.__getitem__, read):
                if self._is_stale(tensor):
                    expected = "a module that computes with the parameters that the call was given"
                    got = "a tensor that it has kept from a pass with other parameters, and reads: "
                    got += "its gradient would be lost"
                    fix = f"reset it before the call, {path} = None, or keep {path}.detach()"
                    raise UnsupportedGraphError(message(path, expected, got, fix))
        return result


def _reads_no_value(func: Any) -> bool:
    """Return whether an operation cuts the graph on purpose, or reads a shape alone."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith(("detach", "new_")) or func == _DATA


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def stale_reads_refused(
    snapshots: Iterable[ModuleSnapshot],
    *,
    state: KeptState | None = None,
    given: Sequence[Tensor] = (),
    substitutes: Mapping[int, Tensor] | None = None,
) -> AbstractContextManager[object]:
    """Return what raises where a module reads what a pass with other params has left in it."""
    # Calls have made some tensors in a `state`, with params that need not be the `given` ones.
    # Others are from before it, or have `substitutes`, by id.
    every = list(snapshots)
    if not any(one.tensors for one in every):
        return INSIDE
    of_modules = {} if state is None else state.made
    made = {k: x for one in every for k, x in of_modules.get(id(one.module), {}).items()}
    left = {key: pair for one in every for key, pair in one.tensors.items()}
    kept = {
        key: (path, x)
        for key, (path, x) in left.items()
        if key in made or (x.requires_grad and not x.is_leaf) or is_of_ended_transform(x)
    }
    for key, tensor in (substitutes or {}).items():
        if key in kept:
            kept[id(tensor)] = kept[key]
    for tensor in given:
        kept.pop(id(tensor), None)  # an LSTM lists its weights

    def is_stale(tensor: Tensor) -> bool:
        if id(tensor) in made:
            return varies(tensor) and any(map(is_not, made[id(tensor)][1], given))  # if in a call
        replaced = {id(x) for one in every for x in one.replaced_params()}
        replaced |= set() if state is None else state.replaced
        if is_of_ended_transform(tensor):
            return bool(replaced) and tensor.requires_grad
        return not replaced.isdisjoint(Subgraph([tensor]).leaves)

    return _StaleReads(kept, is_stale) if kept else INSIDE
