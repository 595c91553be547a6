"""What the caller gave: losses, weights and params, checked and flattened before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, ValuesView
from dataclasses import dataclass
from functools import partial
from numbers import Real
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradkit._compat import fsdp
from gradkit._core import pytree
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    DetachedLossError,
    LeafTypeError,
    NotScalarLossError,
    StructureError,
    UnsupportedGraphError,
    describe,
    message,
)

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")


@dataclass(frozen=True, slots=True)
class Params:
    """The params of a call: its leaves, and the variables among them.

    Attributes:
        leaves: Tensors and None, in the order of the tree, modules and iterators opened up.
        spec: The structure, that of the result.
        variables: What is differentiated: every leaf that requires grad, each tensor once.
        slots: For each leaf its place in `variables`, or None for a leaf that gets no gradient.
        root: The name of the tree in error messages.
        ordinary: All variables are plain leaf tensors: no intermediate values, no subclasses.
    """

    leaves: list[Any]
    spec: Structure
    variables: list[Tensor]
    slots: Sequence[int | None]
    root: str
    ordinary: bool

    def unflatten(self, grads: Sequence[Tensor | None], *, copy_ties: bool) -> PyTree:
        """Return the tree with one gradient for each variable, in every place where it stands.

        Args:
            grads: One gradient, or None, for each of `variables`.
            copy_ties: Give each further place of a tied tensor a copy of its own.

        Returns:
            A tree of structure `spec`.
        """
        if len(grads) == len(self.leaves):
            return pytree.unflatten(self.spec, grads)
        placed: list[Tensor | None] = []
        used: set[int] = set()
        for slot in self.slots:
            grad = None if slot is None else grads[slot]
            if grad is not None and slot in used and copy_ties:
                grad = grad.clone()
            if slot is not None:
                used.add(slot)
            placed.append(grad)
        return pytree.unflatten(self.spec, placed)

    def path(self, variable: int) -> str:
        """Return the way to the first leaf that is this variable."""
        return pytree.path(self.spec, list(self.slots).index(variable), self.root)


# Of a call that differentiates with respect to whatever leaves there are.
NO_PARAMS = Params([], pytree.flatten(())[1], [], [], "params", True)


def read_params(tree: PyTree, root: str = "params", *, wrapped: bool = False) -> Params:
    """Open up and check a tree of params.

    Args:
        tree: Tensors, modules, iterators of tensors, optimizers or None, in any tree.
        root: The name of the tree in error messages.
        wrapped: Take modules that are wrapped for several processes, too.

    Returns:
        Its leaves and variables.

    Raises:
        LeafTypeError: A leaf is nothing that can be differentiated.
        StructureError: There are no leaves.
        UnsupportedGraphError: A module's gradients would be sharded, or this process's alone.
    """
    leaves, spec = expand_params(tree, root, wrapped=wrapped)
    if not leaves:
        raise StructureError(
            message(
                root,
                "at least one tensor",
                "none (so is a module without parameters, or an iterator that was read through)",
                "pass the module, or list(model.parameters())",
            )
        )
    if (
        set(map(type, leaves)) <= PLAIN_TYPES
        and all(map(_requires_grad, leaves))
        and len(set(map(id, leaves))) == len(leaves)
    ):
        return Params(leaves, spec, leaves, range(len(leaves)), root, all(map(_is_leaf, leaves)))
    variables: dict[int, int] = {}
    slots: list[int | None] = []
    for index, leaf in enumerate(leaves):
        if leaf is None or not _is_variable(leaf, partial(pytree.path, spec, index, root)):
            slots.append(None)
        else:
            slots.append(variables.setdefault(id(leaf), len(variables)))
    by_id = {id(leaf): leaf for leaf in leaves}
    unique = [by_id[key] for key in variables]
    ordinary = set(map(type, unique)) <= PLAIN_TYPES and all(map(_is_leaf, unique))
    return Params(leaves, spec, unique, slots, root, ordinary)


def _is_variable(leaf: object, where: Callable[[], str]) -> bool:
    if not isinstance(leaf, Tensor):
        raise LeafTypeError(
            message(
                where(),
                "a tensor, a module, an iterator of tensors, an optimizer or None",
                describe(leaf),
                _advice_for_a_param(leaf),
            )
        )
    if torch.nn.parameter.is_lazy(leaf):
        raise LeafTypeError(
            message(
                where(),
                "a parameter with a shape",
                "one of a lazy module that has not run yet",
                "run one forward pass first",
            )
        )
    if leaf.requires_grad:
        return True
    # A quantized module has integer parameters that the caller did not pick.
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex or isinstance(leaf, nn.Parameter):
        return False
    raise LeafTypeError(
        message(
            where(),
            "a floating-point or complex tensor",
            describe(leaf),
            "leave it out, or put None in its place: integers have no gradient",
        )
    )


def _advice_for_a_param(leaf: object) -> str:
    if isinstance(leaf, str):
        return "dict(model.named_parameters()), not its pairs"
    if isinstance(leaf, set | frozenset):
        return "list(params): a set has no order"
    if callable(leaf):
        return "call it: model.parameters(), not model.parameters"
    return "pass a tensor that requires grad"


def expand_params(tree: PyTree, root: str, *, wrapped: bool = False) -> tuple[list[Any], Structure]:
    """Flatten a tree, with every module, iterator and optimizer in it replaced by its tensors.

    Args:
        tree: Any tree.
        root: The name of the tree in error messages.
        wrapped: Take modules that are wrapped for several processes, too.

    Returns:
        The leaves and the structure of what the tree stands for.

    Raises:
        UnsupportedGraphError: A module is wrapped for several processes.
    """
    leaves, spec = pytree.flatten(tree)
    openers = {kind: _opener(kind) for kind in set(map(type, leaves)) - PLAIN_TYPES}
    if not any(openers.values()):
        return leaves, spec
    opened: list[Any] = []
    for index, leaf in enumerate(leaves):
        opener = openers.get(type(leaf))
        if isinstance(leaf, nn.Module) and not wrapped:
            refuse_distributed(leaf, partial(pytree.path, spec, index, root))
        opened.append(opener(leaf) if opener else leaf)
    return expand_params(pytree.unflatten(spec, opened), root)


def _opener(kind: type) -> Callable[[Any], PyTree] | None:
    if issubclass(kind, nn.Module):
        return lambda module: dict(module.named_parameters())
    if issubclass(kind, (Iterator, ValuesView)):
        return tuple
    if issubclass(kind, Optimizer):
        return lambda opt: tuple(p for group in opt.param_groups for p in group["params"])
    return None


def refuse_distributed(module: nn.Module, where: Callable[[], str]) -> None:
    """Raise if a module is wrapped for several processes.

    Args:
        module: The module.
        where: Tells its path, for the error.

    Raises:
        UnsupportedGraphError: Its gradients would be this process's alone, or missing.
    """
    sharded = fsdp.module_classes()
    for part in module.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            kind = "a DistributedDataParallel module"
            why = "its gradients would be local, not reduced"
        elif isinstance(part, sharded):
            kind = "a module sharded by FSDP"
            why = "its sharded parameters are not in the graph, their gradients would be missing"
        else:
            continue
        raise UnsupportedGraphError(
            message(
                where(),
                "a module of this process",
                f"{kind}: {why}",
                "gradkit.distributed.value_and_grads(losses, module), or "
                "gradkit.distributed.per_loss_grads, or loss.backward()",
            )
        )


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
        """Return the way to a loss: `losses['aux']`."""
        return pytree.path(self.spec, index, "losses")


def read_losses(tree: PyTree, *, scalar: bool) -> Losses:
    """Check a tree of losses.

    Args:
        tree: Real floating-point tensors in any tree; a generator of them stands for a tuple.
        scalar: Whether each must have exactly one element.

    Returns:
        Its leaves.

    Raises:
        LeafTypeError: A leaf is no real floating-point tensor.
        NotScalarLossError: `scalar`, and a loss has another number of elements.
        StructureError: There are no leaves.
    """
    leaves, spec = expand_params(tree, "losses")
    losses = Losses(leaves, spec)
    if not leaves:
        raise StructureError(
            message("losses", "at least one tensor", "an empty tree", "pass a loss")
        )
    for index, loss in enumerate(leaves):
        if not isinstance(loss, Tensor):
            is_number = isinstance(loss, Real)
            do = f"pass the tensor{' itself, before .item() or float()' if is_number else ''}"
            raise LeafTypeError(message(losses.path(index), "a tensor", describe(loss), do))
        if not loss.dtype.is_floating_point:
            do = (
                "make it real: loss.real, or loss.abs().square()"
                if loss.dtype.is_complex
                else "leave it out: integers have no gradient"
            )
            raise LeafTypeError(
                message(losses.path(index), "a real floating-point loss", describe(loss), do)
            )
        if scalar and loss.numel() != 1:
            raise NotScalarLossError(
                message(
                    losses.path(index),
                    "a loss of exactly one element",
                    describe(loss),
                    "loss.sum() or loss.mean(); or gradkit.per_loss_grads(losses, params) for "
                    "the gradient of each element",
                )
            )
    return losses


def require_graph(losses: Losses, outputs: Sequence[Tensor]) -> list[int]:
    """Return which of the losses carry a graph.

    Args:
        losses: The losses, for the error.
        outputs: The tensors to look at, one for each loss.

    Returns:
        Their indices, at least one.

    Raises:
        DetachedLossError: None does.
    """
    live = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not live:
        raise DetachedLossError(
            message(
                ", ".join(map(losses.path, range(min(len(outputs), 3)))),
                "a loss that carries a graph",
                "only constants: made under no_grad or inference_mode, detached, or from inputs "
                "none of which requires grad",
                "compute the loss from the parameters with gradients enabled",
            )
        )
    return live


def read_weights(weights: PyTree, losses: Losses) -> list[float | Tensor] | None:
    """Check the weights of a sum of losses.

    Args:
        weights: Real numbers or one-element real tensors, in a tree that begins that of losses.
        losses: The losses.

    Returns:
        One weight for each loss, or None for ones.

    Raises:
        LeafTypeError: A weight is no real number.
        StructureError: The trees do not match.
    """
    if weights is None:
        return None
    tree = pytree.unflatten(losses.spec, losses.leaves)
    spread = pytree.broadcast_prefix(weights, "weights", tree, "losses")
    for index, weight in enumerate(spread):
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
                    "weights=dict(zip(losses, weights)) for a tensor of several"
                    if isinstance(weight, Tensor)
                    else "pass a number",
                )
            )
    return cast("list[float | Tensor]", spread)
