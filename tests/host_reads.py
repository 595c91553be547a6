"""A record of what reads the numbers of tensors on the host.

On CPU nothing waits for a device, but every operator that would is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# item(), bool() and float() come to the first; the shape of what most others return depends on
# numbers. torch.tensor(numbers, device=...) comes to the last: CUDA waits for that copy.
READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy",
    "masked_select", "unique_dim", "unique_consecutive", "_unique", "_unique2", "lift_fresh",
}  # fmt: skip
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by a mask: nonzero inside
# No operators: on CPU they go to the memory itself. (That cpu() would copy cannot be told there.)
METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class _Operators(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in INDEXED and any(map(is_mask, args[1]))):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class _Methods(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in METHODS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Collect the names of the operators and methods that read a tensor's numbers on the host."""
    seen: list[str] = []
    with _Operators(seen), _Methods(seen):
        yield seen
