"""Private names of torch.func's implementation."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad

# What torch.func's own grad and vjp call; torch.compile traces it as one operation, where it does
# not trace torch.autograd.grad. Zeros for what is not reached. Run on torch 2.13.
autograd_grad = _autograd_grad


def level_of(tensor: Tensor) -> int:
    """Return the transform level that a tensor belongs to, -1 for none. Run on torch 2.13."""
    return torch._C._functorch.maybe_get_level(tensor)


def current_level() -> int | None:
    """Return the number of the innermost transform level. Run on torch 2.13."""
    return torch._C._functorch.maybe_current_level()


def is_transform_tensor(tensor: Tensor) -> bool:
    """Return whether a transform has wrapped this tensor. Run on torch 2.13."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_differentiated_tensor(tensor: Tensor) -> bool:
    """Return whether grad, vjp or jvp has wrapped this tensor. Run on torch 2.13."""
    return torch._C._functorch.is_gradtrackingtensor(tensor)


def innermost_transform() -> Any:
    """Return the interpreter of the innermost transform, None outside. Run on torch 2.13."""
    return torch._C._functorch.peek_interpreter_stack()


def compiled_autograd_disabled() -> AbstractContextManager[Any]:
    """Leave compiled autograd, which cannot run inside a transform. Run on torch 2.13."""
    # Looked up, not imported: a process that has not imported it has not enabled it.
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if module is None else module._disable()


def default_unpack_hook() -> object:
    """Return the unpack hook that saved tensors get at present, if any. Run on torch 2.13."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[1] if hooks else None


def checkpoint_frame() -> type:
    """Return the class of a checkpoint that waits to recompute. Run on torch 2.13."""
    return torch.utils.checkpoint._CheckpointFrame
