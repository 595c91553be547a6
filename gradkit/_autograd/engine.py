"""The calls of torch's engine, with its errors given the names that gradkit has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gradkit._checks.freed import freed, losses_freed
from gradkit._core.call import Call
from gradkit.errors import FreedGraphError, UnsupportedGraphError, message


def run_grad(
    call: Call,
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    seeds: Sequence[Tensor | None],
    *,
    retain_graph: bool,
    is_grads_batched: bool = False,
) -> list[Tensor | None]:
    """Return the gradients of a weighted sum of outputs with respect to tensors or graph edges."""
    try:
        grads = torch.autograd.grad(
            outputs,
            inputs,
            seeds,
            retain_graph=retain_graph,
            create_graph=call.create_graph,
            allow_unused=True,
            is_grads_batched=is_grads_batched,
        )
    except RuntimeError as error:
        _raise_named(error, call)
        raise
    return cast("list[Tensor | None]", list(grads))


def run_backward(
    call: Call,
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    variables: list[Tensor] | None,
    *,
    retain_graph: bool,
) -> None:
    """Accumulate the gradient of a weighted sum of outputs into `.grad` of some, or all, leaves."""
    try:
        torch.autograd.backward(
            outputs,
            seeds,
            retain_graph=retain_graph,
            create_graph=call.create_graph,
            inputs=variables,
        )
    except RuntimeError as error:
        _raise_named(error, call)
        raise


def _raise_named(error: RuntimeError, call: Call) -> None:
    """Raise gradkit's error for one of the engine's, if there is one."""
    if "through the graph a second time" in str(error):
        raise FreedGraphError(freed(call.losses, losses_freed(call.losses))) from error
    if "_will_engine_execute_node" in str(error):
        raise UnsupportedGraphError(_MULTI_GRAD_HOOK) from error
    if "modified by an inplace operation" in str(error):
        raise UnsupportedGraphError(_modified(error, call)) from error


_MULTI_GRAD_HOOK = message(
    "params",
    "leaf tensors without register_multi_grad_hook",
    "one that has it: torch runs such hooks of leaves in backward() only",
    "remove the hook for this call, register it on non-leaf tensors, or use backward_",
)


def _modified(error: RuntimeError, call: Call) -> str:
    losses = call.losses
    return message(
        ", ".join(map(losses.path, range(min(3, len(losses.leaves))))),
        "a graph whose saved tensors are as they were in the forward pass",
        f"one that has changed since: {str(error).partition(' Hint')[0].rstrip('.')}",
        "take the gradients before the optimizer's step, or change a copy",
    )
