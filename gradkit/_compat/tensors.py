"""Private names of torch around tensors: as one vector, without subclasses, with each operator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch._utils
from torch import Tensor

# The mode that sees every operator as it runs. Run on torch 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "flatten_dense", "without_torch_function"]


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector of the entries of dense tensors of one dtype. Run on torch 2.13."""
    flat = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return cast("Tensor", flat)


def without_torch_function() -> AbstractContextManager[object]:
    """Let no tensor subclass change what torch functions return in a block. Run on torch 2.13."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunctionSubclass()
    return context
