"""What torch.func raises about a function, in gradkit's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from gradkit.errors import GradkitError, UnsupportedGraphError, message

R = TypeVar("R")


def named_errors(run: Callable[[], R]) -> R:
    """Return what `run` returns; errors of torch.func that are known raise with what to do."""
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except RuntimeError as error:
        for text, (expected, got, fix) in _KNOWN.items():
            if text in str(error) and not isinstance(error, GradkitError):
                got = got or str(error).partition("\n")[0]
                raise UnsupportedGraphError(message("fn", expected, got, fix)) from error
        raise


_DIFFERENTIABLE = "what torch.func can differentiate"
_AUTOGRAD_CALL = (
    _DIFFERENTIABLE,
    "a call of backward(), retain_grad() or requires_grad_(), or of torch.autograd.functional",
    "nest gradkit.func or torch.func calls, and return intermediate values as aux",
)
_FORWARD = (
    "operations that have a forward-mode derivative",
    "",
    'hvp(..., mode="reverse-over-reverse"), or vjp in place of jvp',
)
# By a part of torch's text: what was expected, what came (torch's text if empty), what to do.
_KNOWN = {
    "saved tensor hooks": (
        _DIFFERENTIABLE,
        "saved-tensor hooks: a checkpoint, or save_on_cpu",
        "leave them out, or compute the losses eagerly: gradkit.value_and_grads(losses, params)",
    ),
    "backward() called inside a functorch transform": _AUTOGRAD_CALL,
    "inside of a function being transformed by a functorch transform": _AUTOGRAD_CALL,
    "would mutate a captured Tensor": (
        _DIFFERENTIABLE,
        "an in-place operation on a tensor from outside: batch norm in train mode, say",
        "call, params, buffers = gradkit.func.make_functional(module), and return the new buffers "
        "as aux",
    ),
    "setup_context": (
        _DIFFERENTIABLE,
        "an autograd.Function whose forward takes ctx, or a full backward hook of a module",
        "give the Function a setup_context staticmethod; or compute the losses eagerly: "
        "gradkit.value_and_grads(losses, params)",
    ),
    "randomness error mode": (
        'no random operation, with randomness="error"',
        "one: dropout, say",
        'randomness="different" for other numbers in each sample, or "same"',
    ),
    "while the running_mean or running_var": (
        "a function of one sample at a time",
        "a norm layer that updates its running statistics from a batch",
        "module.eval(), or track_running_stats=False",
    ),
    "forward AD": _FORWARD,
    "ZeroTensors are immutable": _FORWARD,
}
