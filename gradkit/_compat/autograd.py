"""torch's private names for autograd and tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch._utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# The type of the nodes that accumulate the gradient of a leaf tensor.
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def current_pass() -> int:
    """Return the number of the engine's pass that runs in this thread; -1 outside of passes."""
    return torch._C._current_graph_task_id()


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call a function once the pass that runs in this thread is done, which raises what it raises.

    Before the pass returns, and on the streams of its caller; not if it fails [E7]. torch's DDP and
    FSDP end their reductions so. Run on torch 2.11 to 2.15.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# How many owners a tensor's storage has, by the address that `UntypedStorage._cdata` gives.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count

# How many owners a tensor has, torch's own among them; before 2.12, only Python's are counted.
tensor_use_count: Callable[[Any], int] = getattr(Tensor, "_use_count", sys.getrefcount)

# Whether a tensor stands for zeros without memory of its own, as torch.func makes them.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor


__all__ = ["TorchDispatchMode", "flatten_dense", "without_torch_function"]


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector of the entries of dense tensors of one dtype.

    Run on torch 2.11 to 2.15.
    """
    flat = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return cast("Tensor", flat)


def without_torch_function() -> AbstractContextManager[object]:
    """Let no tensor subclass change what torch functions return in a block.

    Run on torch 2.11 to 2.15.
    """
    context: AbstractContextManager[object] = torch._C.DisableTorchFunctionSubclass()
    return context
