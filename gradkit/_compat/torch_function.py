"""torch's switch for `__torch_function__`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def without_torch_function() -> AbstractContextManager[object]:
    """Let no tensor subclass change what torch functions return in a block. Run on torch 2.13."""
    context: AbstractContextManager[object] = torch._C.DisableTorchFunctionSubclass()
    return context
