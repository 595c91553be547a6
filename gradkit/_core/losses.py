"""Losses and their weights, flattened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from operator import attrgetter
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.options import is_number
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params, expand_params
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.tensor_nodes import refuse_lost_history
from gradkit.errors import (
    DetachedLossError,
    GradkitError,
    LeafTypeError,
    NotScalarLossError,
    StructureError,
    describe,
    message,
    with_article,
)

# The error, what was expected, and what to do.
Defect: TypeAlias = tuple[type[GradkitError], str, str]
_grad_fn = attrgetter("grad_fn")
_LOSSES_FIRST = "the arguments are (losses, params), in this order: pass the loss first"


@dataclass(slots=True)
class Losses:
    """The losses of a call: the tensors, in the order of the tree, and its structure."""

    leaves: list[Tensor]
    spec: Structure

    def path(self, index: int) -> str:
        """Return the path of a loss: `losses['aux']`."""
        return pytree.path(self.spec, index, "losses")

    def first_paths(self) -> str:
        """Return the paths of the first three losses, for an error that concerns all of them."""
        return ", ".join(map(self.path, range(min(len(self.leaves), 3))))


def lone_loss(loss: Tensor) -> Losses:
    """Return a loss that has been checked, as the losses of a call."""
    return Losses(*pytree.flatten(loss))


def read_losses(
    tree: PyTree,
    *,
    scalar: bool,
    returned: bool = False,
    may_be_aux: bool = False,
) -> Losses:
    """Check a tree of losses: given by the caller, or `returned` by the caller's function."""
    leaves, spec = pytree.flatten(tree)
    if not set(map(type, leaves)) <= PLAIN_TYPES and not any(map(_has_params, leaves)):
        leaves, spec = expand_params(tree, "losses")  # an iterator of losses, say
    losses = Losses(leaves, spec)
    if not leaves:
        is_iterator = hasattr(tree, "__next__")
        got = "an iterator with nothing left in it" if is_iterator else "an empty tree"
        raise StructureError(message("losses", "at least one tensor", got, "pass a loss"))
    for index, loss in enumerate(leaves):
        defect = _defect(loss, scalar, returned)
        if defect is not None:
            error, expected, fix = defect
            if may_be_aux and type(tree) is tuple and len(tree) == 2:
                fix += "; if this is aux, pass has_aux=True"
            raise error(message(losses.path(index), expected, describe(loss), fix))
    try:
        _ = returned or list(map(_grad_fn, leaves))
    except RuntimeError:
        refuse_lost_history(leaves, losses.path)
        raise
    return losses


def _has_params(leaf: object) -> TypeGuard[nn.Module | Optimizer]:
    return isinstance(leaf, nn.Module | Optimizer)


def _defect(loss: Any, scalar: bool, returned: bool) -> Defect | None:
    """Return why this is no loss, or None if it is one."""
    if not isinstance(loss, Tensor):
        return LeafTypeError, "a tensor", _advice_for_no_tensor(loss, returned)
    if not loss.dtype.is_floating_point:
        fix = "leave it out: integers have no gradient"
        if loss.dtype.is_complex:
            fix = "make it real: loss.real, or loss.abs().square()"
        return LeafTypeError, "a real floating-point loss", fix
    if not scalar and loss.is_nested:
        fix = "a loss for each part: list(loss.unbind())"
        return LeafTypeError, "a tensor whose elements can be counted", fix
    if scalar and loss.numel() != 1:
        fix = (
            "loss.sum() or loss.mean(); with a weight for each element, (weights * loss).sum(), or "
            "gradkit.func.vjp(fn, params) and its pull(weights); for the gradient of each element, "
            "gradkit.per_loss_grads(losses, params)"
        )
        fix = _LOSSES_FIRST if isinstance(loss, nn.Parameter) else fix
        return NotScalarLossError, "a loss of exactly one element", fix
    return None


def _advice_for_no_tensor(loss: object, returned: bool) -> str:
    if isinstance(loss, Real):
        return "pass the tensor itself, before .item() or float(); a constant as torch.tensor(0.0)"
    if _has_params(loss):
        if returned:
            return "return the loss, computed with it"
        is_criterion = isinstance(loss, nn.Module) and not any(True for _ in loss.parameters())
        return "call it, and pass the loss that it returns" if is_criterion else _LOSSES_FIRST
    if not callable(loss):
        return "pass the tensor"
    if returned:
        return "call it, and return the loss"
    return "call it, and pass the loss; or gradkit.func.value_and_grads(fn)(params)"


_CONSTANTS = (
    "only constants: made under no_grad or inference_mode, detached, from inputs none of which "
    "requires grad, by a checkpoint with use_reentrant=True of such inputs, or by an operation "
    "that drops its graph (torch.special.airy_ai, say)"
)
_WITH_GRAPH = (
    "compute the loss from the parameters with gradients enabled, and checkpoint with "
    "use_reentrant=False; gradkit returns detached values: pass the loss itself, or get them with "
    "create_graph=True; `with gradkit.checked():` around the forward pass names an operation that "
    "drops its graph"
)


def require_graph(
    losses: Losses, outputs: Sequence[Tensor], params: Sequence[Params] = ()
) -> list[int]:
    """Return the indices of the outputs, one for each loss, that carry a graph; raise if none."""
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not differentiable:
        raise DetachedLossError(_why_constant(losses, params))
    return differentiable


def _why_constant(losses: Losses, params: Sequence[Params]) -> str:
    """Return the message for losses without a graph, which names the params that are frozen."""
    frozen = [leaf for one in params for leaf in one.frozen_leaves()]
    if not frozen:
        return message(losses.first_paths(), "a loss that carries a graph", _CONSTANTS, _WITH_GRAPH)
    paths = ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else "")
    call = f"call {frozen[0]}.requires_grad_() before the forward pass"
    if not any(one.variables for one in params):
        got = f"none that does, and so no loss that carries a graph: {losses.first_paths()}"
        fix = f"{call}; state_dict() and .data are detached, so pass the module"
        return message(paths, "parameters that require grad", got, fix)
    got = f"{_CONSTANTS}; without requires_grad is {paths}"
    fix = f"{_WITH_GRAPH}; or {call}"
    return message(losses.first_paths(), "a loss that carries a graph", got, fix)


def params_of_each_loss(losses: Losses, params: PyTree) -> list[PyTree]:
    """Return the part of `params` that stands in the place of each loss."""
    if isinstance(params, nn.Module) and losses.spec.type is not None:
        got = f"one module, {with_article(type(params).__name__)}"
        fix = 'a dict of modules with the keys of the losses: {"G": generator, "D": discriminator}'
        if isinstance(params, nn.ModuleList | nn.Sequential) and losses.spec.type in (list, tuple):
            fix = f"{losses.spec.type.__name__}(params), which has one module for each loss"
        elif isinstance(params, nn.ModuleDict) and losses.spec.type is dict:
            fix = "dict(params.items()), with the keys of the losses"
        raise StructureError(message("params", "a tree with the structure of losses", got, fix))
    return pytree.flatten_up_to(losses.spec, "losses", params, "params")


def _is_weight(weight: Tensor, loss: Tensor) -> bool:
    if weight.layout != torch.strided or weight.dtype.is_complex:
        return False
    return weight.numel() == 1 and (loss.is_meta or not weight.is_meta)


def read_weights(weights: PyTree, losses: Losses) -> list[float | Tensor] | None:
    """Return one weight for each loss, or None for ones."""
    if weights is None:
        return None
    tree = pytree.unflatten(losses.spec, losses.leaves)
    by_loss = pytree.broadcast_prefix(weights, "weights", tree, "losses")
    for index, weight in enumerate(by_loss):
        fix = "pass a number"
        if callable(weight) and not isinstance(weight, Tensor):
            fix = "weights=weighting, for all losses, in gradkit.value_and_grads(losses, params)"
        fits = is_number(weight)
        if isinstance(weight, Tensor):
            fix = "weights=list(weights) for a tensor of several"
            if losses.spec.type is dict:
                fix = "weights=dict(zip(losses, weights)) for a tensor of several"
            if weight.layout != torch.strided:
                fix = "pass weight.to_dense()"
            elif weight.is_meta:
                fix = "pass a weight that has a value"
            fits = _is_weight(weight, losses.leaves[index])
        if not fits:
            where = f"the weight of {losses.path(index)}"
            expected = "a real number that fits in a float, or a real tensor of one element"
            raise LeafTypeError(message(where, expected, describe(weight), fix))
    return cast("list[float | Tensor]", by_loss)
