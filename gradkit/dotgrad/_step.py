"""`step_`: one step of an optimizer, from gradients that are a value."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradkit._autograd.passes import ordinary_mode
from gradkit._compat.dynamo import disable_compile
from gradkit._core.ownership import copy_for
from gradkit._core.pytree import PyTree
from gradkit._state.dot_grad import grads_put_back
from gradkit.dotgrad._pairs import Pairs, match, unique
from gradkit.errors import (
    StructureError,
    UnsupportedOptimizerError,
    describe,
    message,
)


@disable_compile
def step_(
    optimizer: Optimizer, params: PyTree, grads: PyTree, *, scaler: GradScaler | None = None
) -> None:
    """Take one step of an optimizer with these gradients; every `.grad` is as before afterwards.

    Weights and optimizer state are bit for bit those of the `.grad` loop. A parameter of the
    optimizer that is not in `params`, or whose gradient is None, is skipped, as after a
    `.backward()` that did not reach it.

    Example:
        >>> import torch, gradkit
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> value, grads = gradkit.value_and_grads((w * w).sum(), [w])
        >>> gradkit.step_(optimizer, [w], grads)
        >>> w
        tensor([0.8000, 0.8000], requires_grad=True)

    Args:
        optimizer: Its `step()` is called once, with its hooks and its scheduler's.
        params: As in `write_grads_`.
        grads: As in `write_grads_`; with a `scaler`, the gradients of the scaled loss, unless the
            caller has called `scaler.unscale_(optimizer)` in this step (to clip, say): then the
            unscaled ones.
        scaler: Unscales the gradients and skips the step if one is inf or NaN, by
            `scaler.step(optimizer)`; `scaler.update()` stays the caller's.

    Raises:
        LeafTypeError: As in `write_grads_`.
        StructureError: As in `write_grads_`; or a gradient belongs to no parameter of the
            optimizer; or all are None and there is a scaler, which needs one.
        UnsupportedGraphError: As in `read_grads`.
        UnsupportedOptimizerError: The optimizer's `step` needs a closure, as that of LBFGS does.
    """
    _refuse_closure(optimizer)
    pairs = match(params, grads)
    own_params = unique(p for group in optimizer.param_groups for p in group["params"])
    _refuse_foreign(pairs, own_params)
    if scaler is not None and all(grad is None for _, grad in pairs):
        do = "skip the step, and scaler.update()"
        raise StructureError(message("grads", "a gradient to unscale", "None everywhere", do))
    with grads_put_back(own_params):
        with ordinary_mode():
            for leaf, grad in pairs:
                leaf.grad = None if grad is None else copy_for(grad.detach(), leaf)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            message(
                "optimizer",
                "one whose step() takes gradients as they are",
                f"{type(optimizer).__name__}, whose step needs a closure that computes them anew",
                "with capture_grads(params): optimizer.step(closure)",
            )
        )


def _refuse_foreign(pairs: Pairs, own_params: Iterable[Tensor]) -> None:
    known = {id(p) for p in own_params}
    for leaf, grad in pairs:
        if grad is not None and id(leaf) not in known:
            raise StructureError(
                message(
                    "params",
                    "parameters of the optimizer",
                    f"{describe(leaf)} that it does not have: its gradient would be dropped",
                    "pass the part of params and grads that this optimizer steps",
                )
            )
