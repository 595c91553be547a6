"""`minimize_`: a whole training step in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradkit._autograd.gramian import weights_from_gramian
from gradkit._autograd.passes import run_jointly, values_of
from gradkit._checks.reachability import require_reached
from gradkit._compat.distributed import PROCESS_GROUPS, replicas_of
from gradkit._compat.dynamo import disable_compile
from gradkit._core import pytree
from gradkit._core.call import Losses, check_number, read_losses
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import Grads, Params, read_params
from gradkit._core.pytree import PyTree
from gradkit._state.grad_attribute import set_grads
from gradkit.dotgrad._before_step import REDUCED, STACKED, TERMS, refuse_scaled
from gradkit.dotgrad._kernels import step_by_kernels
from gradkit.dotgrad._step import check_arguments, take_steps
from gradkit.errors import LeafTypeError, StructureError, message


class _Options(TypedDict, total=False):
    weights: PyTree
    scaler: GradScaler | None


_Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


@overload
def minimize_(
    optimizer: _Optimizers, losses: Tensor, *, max_norm: None = ..., **options: Unpack[_Options]
) -> Tensor: ...
@overload
def minimize_(
    optimizer: _Optimizers, losses: PyTree, *, max_norm: None = ..., **options: Unpack[_Options]
) -> PyTree: ...
@overload
def minimize_(
    optimizer: _Optimizers, losses: PyTree, *, max_norm: float | Tensor, **options: Unpack[_Options]
) -> tuple[PyTree, Tensor]: ...
@disable_compile
def minimize_(
    optimizer: _Optimizers,
    losses: PyTree,
    *,
    weights: PyTree = None,
    scaler: GradScaler | None = None,
    max_norm: float | Tensor | None = None,
) -> PyTree:
    """Take one step of an optimizer down the weighted sum of losses, and return their values.

    The whole of `zero_grad()`, `backward()` and `step()`: weights and optimizer state are bit for
    bit those of that loop, from one engine pass. No `.grad` is read, or changed afterwards.

    Example:
        >>> import torch, gradkit
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> value = gradkit.minimize_(optimizer, loss)
        >>> value.requires_grad, model.weight.grad
        (False, None)

    Args:
        optimizer: What is stepped; its parameters are what the losses are differentiated with
            respect to. Or a list of optimizers, each of which steps once, in order, with the
            gradients of the one pass. A parameter that no loss reaches is skipped, as by the loop.
            If `DistributedDataParallel` has them, all ranks make the call, and step with the means.
        losses: As in `value_and_grads`. Their graph is freed.
        weights: As in `value_and_grads`.
        scaler: `minimize_` takes plain losses and scales them by itself; `step_` takes gradients of
            scaled losses. The step is `scaler.step(optimizer)`, which unscales, and skips the step
            if a gradient is inf or NaN. Call `scaler.update()` afterwards, as in the loop, and no
            `unscale_` before. The values that are returned are not scaled.
        max_norm: Clip the gradients, unscaled if there is a scaler, to this global norm, over all
            optimizers together, as `torch.nn.utils.clip_grad_norm_` does.

    Returns:
        `values`: a tree like `losses`, of their shapes and dtypes, detached copies. With
        `max_norm`, `(values, norm)`: the global norm before clipping, a 0-dim tensor.

    Raises:
        GradkitError: As in `value_and_grads` and `step_`, before anything has changed. If a step
            itself raises, parameters and states are as its own `step()` leaves them.
        LeafTypeError: A parameter is sparse, of a layout in which torch keeps no `.grad`.
        StructureError: The list of optimizers is empty, or has one of them twice.
        OptionError: A loss comes from `scaler.scale` of any GradScaler, in a sum too; or
            `scaler.unscale_(optimizer)` has been called in this step.

    Source:
        `torch.optim.Optimizer.step` and the functional forms in torch.optim that it calls,
        https://pytorch.org/docs/stable/optim.html
    """
    if torch.is_inference_mode_enabled():
        with leave_inference_mode():
            options: Any = {"weights": weights, "scaler": scaler, "max_norm": max_norm}
            return minimize_(optimizer, losses, **options)
    several = isinstance(optimizer, list | tuple)
    optimizers: list[Any] = [*optimizer] if several else [optimizer]  # type: ignore[misc]
    if not optimizers or len(set(map(id, optimizers))) < len(optimizers):
        expected, fix = "each optimizer once", "gradkit.minimize_([first, second], losses)"
        got = "one of them twice" if optimizers else "an empty list"
        raise StructureError(message("optimizer", expected, got, fix))
    for one in optimizers:
        check_arguments(one, None, losses, scaler, max_norm)
    if max_norm is not None:
        check_number("max_norm", max_norm, "max_norm=1.0, or leave it out", nonnegative=True)
    flat = read_losses(losses, scalar=True)
    is_scaled = scaler is not None
    for loss in flat.leaves:
        node: Any = loss.grad_fn
        is_scaled = is_scaled or type(node) in TERMS
        if not is_scaled and type(node) in REDUCED:
            is_scaled = type(node.next_functions[0][0]) is STACKED
    if is_scaled:
        refuse_scaled(flat, scaler, optimizers)
    params = _read_params(optimizers)
    is_replicated = bool(PROCESS_GROUPS) and bool(replicas_of(params.variables))
    if weights is not None and callable(weights) and not is_replicated:
        weights = weights_from_gramian(flat, params, weights)
    scaled = flat
    if scaler is not None:
        scaled = Losses([scaler.scale(loss) for loss in flat.leaves], flat.spec)
    if is_replicated:
        values, grads = values_of(flat, False), _means_over_ranks(flat, scaled, params, weights)
    else:
        result = run_jointly(
            scaled, params, weights, unused="none", create_graph=False, retain=False
        )
        grads = result.grads[0]
        if type(None) in map(type, grads):
            require_reached(result.call, result.grads)
        values = result.values if scaler is None else values_of(flat, False)
    if not several and scaler is None and max_norm is None:
        # The step may write on the gradients: nothing else refers to them.
        of_params = grads if len(grads) == len(params.leaves) else params.per_leaf(grads)
        if step_by_kernels(optimizer, of_params, may_write=True):
            return values
    own_params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    variables = params.variables
    for index, (variable, grad) in enumerate(zip(variables, grads, strict=True)):
        if grad is not None and grad.layout not in (variable.layout, torch.sparse_coo):
            expected, got = "one whose .grad can be its gradient", f"one of {variable.layout}"
            fix = "a parameter that is dense, or sparse of layout torch.sparse_coo"
            raise LeafTypeError(message(params.path(index), expected, got, fix))
    assign = partial(set_grads, variables, grads)
    norm = take_steps(optimizers, own_params, variables, assign, scaler, max_norm)
    return values if max_norm is None else (values, norm)


def _means_over_ranks(losses: Losses, scaled: Losses, params: Params, weights: PyTree) -> Grads:
    """Return the gradients of parameters that DistributedDataParallel has, reduced as by it."""
    from gradkit.distributed import _public_calls as ranks  # lazily: a slow import

    module = params.variables
    if weights is not None and callable(weights):
        tree = pytree.unflatten(losses.spec, losses.leaves)
        weights = ranks.weights_from_gram("gradkit.minimize_", tree, module, weights)
    tree = pytree.unflatten(scaled.spec, scaled.leaves)
    grads: Grads = ranks.value_and_grads(tree, module, weights=weights)[1]
    return grads


def _read_params(optimizers: list[Any]) -> Params:
    """Return the parameters of all groups of the optimizers."""
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        params = optimizers[0].param_groups[0]["params"]
        return read_params(params, "optimizer", allow_distributed=True)
    trees = [[p for group in one.param_groups for p in group["params"]] for one in optimizers]
    tree = trees[0] if len(trees) == 1 else trees
    return read_params(tree, "optimizer", allow_distributed=True)
