"""Mistakes in the arguments that the trees themselves would report as something else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.params import Params
from gradkit._core.pytree import PyTree, Structure
from gradkit.errors import (
    GradkitError,
    LeafTypeError,
    OptionError,
    StructureError,
    UnsupportedOptimizerError,
    describe,
    message,
)


def refuse_state_dict(tree: PyTree, root: str) -> None:
    """Raise if a tree is a module's state_dict, whose tensors are copies without `.grad`."""
    if not isinstance(tree, OrderedDict) or not hasattr(tree, "_metadata"):
        return
    if any(isinstance(value, nn.Parameter) for value in tree.values()):
        return  # state_dict(keep_vars=True): the parameters themselves
    expected = "gradients" if root == "grads" else "parameters"
    got = "a state_dict(), whose tensors are the detached values of parameters and buffers"
    advice = "value, grads = gradkit.value_and_grads(loss, model)"
    if root == "params":
        advice = "pass the module itself, or dict(model.named_parameters())"
    raise LeafTypeError(message(root, expected, got, advice))


def known_mistake(params: Params, grads: PyTree) -> GradkitError | None:
    """Return the error for gradients that do not match, if it is known what they are instead."""
    pair = "value, grads = gradkit.value_and_grads(losses, params)"
    if type(grads) is tuple and len(grads) == 2 and _matches(params.spec, grads[1]):
        got = "a pair (values, gradients) that was not unpacked"
        return StructureError(message("grads", "a tree of gradients", got, pair))
    leaves, _ = pytree.flatten(grads)
    for leaf in leaves:
        if isinstance(leaf, nn.Module | Optimizer | nn.Parameter):
            advice = "pass params before grads: (params, grads), or step_(optimizer, params, grads)"
            got = f"params: {describe(leaf)}"
            return LeafTypeError(message("grads", "gradients", got, advice))
    if isinstance(grads, Tensor) and grads.requires_grad and not params.spec.is_leaf():
        got = f"a loss: {describe(grads)}"
        return StructureError(message("grads", "a tree of gradients", got, pair))
    if not isinstance(grads, Tensor | None) and _is_per_loss(params.spec, grads):
        advice = "gradkit.combine(grads, aggregator_or_weights), which makes one gradient of them"
        got = "those of several losses"
        return StructureError(message("grads", "the gradients of one loss", got, advice))
    return None


def _matches(spec: Structure, tree: PyTree) -> bool:
    """Return whether a tree has this structure, with gradients for leaves."""
    leaves, own_spec = pytree.flatten(tree)
    return own_spec == spec and all(isinstance(leaf, Tensor | None) for leaf in leaves)


def _is_per_loss(spec: Structure, grads: PyTree) -> bool:
    children, _ = pytree.children(grads)
    return bool(children) and all(_matches(spec, child) for child in children)


def check_step_arguments(optimizer: Any, params: PyTree, grads: PyTree, scaler: Any) -> None:
    """Raise if the optimizer is not one, or the scaler is not a GradScaler."""
    if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
        advice = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
        if isinstance(params, Optimizer) or isinstance(grads, Optimizer):
            advice = "pass the optimizer first: gradkit.step_(optimizer, params, grads)"
        elif hasattr(optimizer, "optimizer"):
            advice = "pass the optimizer itself, and call the scheduler's step() as before"
        expected, got = "a torch.optim.Optimizer", describe(optimizer)
        raise UnsupportedOptimizerError(message("optimizer", expected, got, advice))
    if scaler is not None and not isinstance(scaler, GradScaler):
        expected, advice = "a torch.amp.GradScaler or None", "scaler=torch.amp.GradScaler()"
        raise OptionError(message("scaler", expected, describe(scaler), advice))
