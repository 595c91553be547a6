"""Losses and their weights, flattened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.options import is_number
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import expand_params
from gradkit._core.pytree import PyTree, Structure
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
    with_graph: bool = False,
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
    if with_graph and not any(loss.requires_grad for loss in leaves):
        raise DetachedLossError(message(losses.first_paths(), *_NO_GRAPH))
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


_NO_GRAPH = (
    "a loss that carries a graph",
    "only constants: made under no_grad or inference_mode, detached, from inputs none of which "
    "requires grad, or by an operation that drops its graph (torch.special.airy_ai, say)",
    "compute the loss from the parameters with gradients enabled; gradkit returns detached values: "
    "pass the loss itself, or get them with create_graph=True; `with gradkit.checked():` around "
    "the forward pass names an operation that drops its graph",
)


def require_graph(losses: Losses, outputs: Sequence[Tensor]) -> list[int]:
    """Return the indices of the outputs, one for each loss, that carry a graph; raise if none."""
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not differentiable:
        raise DetachedLossError(message(losses.first_paths(), *_NO_GRAPH))
    return differentiable


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
