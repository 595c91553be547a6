"""Losses and their weights, flattened and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._core import pytree
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
)

# The error, what was expected, and what to do.
Defect: TypeAlias = tuple[type[GradkitError], str, str]


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a call.

    Attributes:
        leaves: The tensors, in the order of the tree.
        spec: The structure.
    """

    leaves: list[Tensor]
    spec: Structure

    def path(self, index: int) -> str:
        """Return the path of a loss: `losses['aux']`."""
        return pytree.path(self.spec, index, "losses")


def read_losses(
    tree: PyTree, *, scalar: bool, returned: bool = False, may_be_aux: bool = False
) -> Losses:
    """Check a tree of losses: given by the caller, or `returned` by the caller's function."""
    leaves, spec = pytree.flatten(tree)
    if set(map(type, leaves)) - PLAIN_TYPES:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, nn.Module | Optimizer):
                raise LeafTypeError(_swapped(leaf, pytree.path(spec, index, "losses"), returned))
        leaves, spec = expand_params(tree, "losses")
    losses = Losses(leaves, spec)
    if not leaves:
        got = "an iterator with nothing left in it" if _is_iterator(tree) else "an empty tree"
        raise StructureError(message("losses", "at least one tensor", got, "pass a loss"))
    for index, loss in enumerate(leaves):
        defect = _defect(loss, scalar, returned)
        if defect is not None:
            error, expected, fix = defect
            if may_be_aux and type(tree) is tuple and len(tree) == 2:
                fix += "; if this is aux, pass has_aux=True"
            raise error(message(losses.path(index), expected, describe(loss), fix))
    return losses


def _is_iterator(tree: object) -> bool:
    return hasattr(tree, "__next__")


def _swapped(leaf: object, where: str, returned: bool) -> str:
    fix = "return the loss, computed with it"
    if not returned:
        fix = "the arguments are (losses, params), in this order: pass the loss first"
    return message(where, "a tensor", f"a {type(leaf).__name__}", fix)


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
            "loss.sum() or loss.mean(); or gradkit.per_loss_grads(losses, params) for the gradient "
            "of each element"
        )
        if isinstance(loss, nn.Parameter):
            fix = "the arguments are (losses, params), in this order: pass the loss first"
        return NotScalarLossError, "a loss of exactly one element", fix
    return None


def _advice_for_no_tensor(loss: object, returned: bool) -> str:
    if isinstance(loss, Real):
        return "pass the tensor itself, before .item() or float()"
    if callable(loss):
        if returned:
            return "call it, and return the loss"
        return "call it, and pass the loss; or gradkit.func.value_and_grads(fn)(params)"
    return "pass the tensor"


def require_graph(losses: Losses, outputs: Sequence[Tensor]) -> list[int]:
    """Return the indices of the outputs, one for each loss, that carry a graph; raise if none."""
    differentiable = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not differentiable:
        raise DetachedLossError(
            message(
                ", ".join(map(losses.path, range(min(len(outputs), 3)))),
                "a loss that carries a graph",
                "only constants: made under no_grad or inference_mode, detached, or from inputs "
                "none of which requires grad",
                "compute the loss from the parameters with gradients enabled; gradkit returns "
                "detached values: pass the loss itself, or get them with create_graph=True",
            )
        )
    return differentiable


def params_of_each_loss(losses: Losses, params: PyTree) -> list[PyTree]:
    """Return the part of `params` that stands in the place of each loss."""
    if isinstance(params, nn.Module) and losses.spec.type is not None:
        raise StructureError(
            message(
                "params",
                "a tree with the structure of losses",
                f"one module, a {type(params).__name__}",
                "list(params) for a list of losses; or a dict of the modules, with the keys of the "
                'losses: {"G": generator, "D": discriminator}',
            )
        )
    return pytree.flatten_up_to(losses.spec, "losses", params, "params")


def read_weights(weights: PyTree, losses: Losses) -> list[float | Tensor] | None:
    """Return one weight for each loss, or None for ones."""
    if weights is None:
        return None
    tree = pytree.unflatten(losses.spec, losses.leaves)
    by_loss = pytree.broadcast_prefix(weights, "weights", tree, "losses")
    for index, weight in enumerate(by_loss):
        if isinstance(weight, Tensor):
            fits = weight.numel() == 1 and not weight.dtype.is_complex
        else:
            fits = isinstance(weight, Real)
        if not fits:
            raise LeafTypeError(
                message(
                    f"the weight of {losses.path(index)}",
                    "a real number or a real tensor of one element",
                    describe(weight),
                    _advice_for_a_weight(weight, losses),
                )
            )
    return cast("list[float | Tensor]", by_loss)


def _advice_for_a_weight(weight: object, losses: Losses) -> str:
    if not isinstance(weight, Tensor):
        return "pass a number"
    if losses.spec.type is dict:
        return "weights=dict(zip(losses, weights)) for a tensor of several"
    return "weights=list(weights) for a tensor of several"
