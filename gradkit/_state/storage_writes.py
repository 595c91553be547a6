"""What a computation writes to memory that it did not allocate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradkit._compat.tensors import TorchDispatchMode

Snapshots: TypeAlias = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]


class StorageWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies each storage from outside before an operator first writes to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.snapshots: Snapshots = []
        # Storages that need no copy: allocated inside, or copied already.
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for index, name in _written_arguments(func):
            self._snapshot(args[index] if index < len(args) else kwargs.get(name))
        out = func(*args, **kwargs)
        if _allocates(func):
            for result in out if isinstance(out, tuple | list) else (out,):
                if isinstance(result, Tensor) and result.layout == torch.strided:
                    self._known.add(result.untyped_storage()._cdata)
        return out

    def _snapshot(self, written: Any) -> None:
        for tensor in written if isinstance(written, tuple | list) else (written,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.snapshots.append((storage, _copy(storage)))


def current(snapshots: Snapshots) -> Snapshots:
    """Return new snapshots of the same storages."""
    return [(storage, _copy(storage)) for storage, _ in snapshots]


def restore(snapshots: Snapshots) -> None:
    """Write the copies back to their storages; version counters do not count it."""
    for storage, copy in snapshots:
        storage.copy_(copy)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return cast("torch.UntypedStorage", storage.clone())  # type: ignore[no-untyped-call]


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the position and name of each argument that an operator writes to."""
    if func.overloadpacket.__name__ in _MISSING_FROM_SCHEMA:
        return _MISSING_FROM_SCHEMA[func.overloadpacket.__name__]
    return [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def _allocates(func: Any) -> bool:
    """Return whether the results of an operator are new, and no views of its arguments."""
    return all(result.alias_info is None for result in func._schema.returns)


# Their schemas do not say that the running statistics are written to.
_STATISTICS = [(3, "running_mean"), (4, "running_var")]
_MISSING_FROM_SCHEMA: dict[str, list[tuple[int, str]]] = {
    "native_batch_norm": _STATISTICS,
    "cudnn_batch_norm": _STATISTICS,
    "miopen_batch_norm": _STATISTICS,
}
