"""Any class of torch.optim as a pure optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.functorch import is_differentiated_tensor
from gradkit._compat.transforms import differentiated, is_dual, transforms
from gradkit.errors import GradkitError, UnsupportedOptimizerError, describe, message
from gradkit.meta._adam import adam, adamw
from gradkit.meta._foreach import Tensors
from gradkit.meta._hyperparams import check_names
from gradkit.meta._optimizer import Columns, Optimizer
from gradkit.meta._rmsprop import rmsprop
from gradkit.meta._sgd import sgd
from gradkit.meta._torch_step import OptimizerClass, torch_step
from gradkit.meta._trees import open_tensors

_REIMPLEMENTED: Mapping[type, Callable[..., Optimizer]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.RMSprop: rmsprop,
}
# They choose the kernel, not the result.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_REFUSED = {
    "LBFGS": "it evaluates the loss itself, in a closure, any number of times",
    "SparseAdam": "it takes sparse gradients only, and updates only the rows that they hold",
}
# Hyper-parameters through which torch's own code keeps the gradient right [T3].
_DIFFERENTIABLE = {"NAdam": {"lr", "momentum_decay"}, "RAdam": {"lr"}}


def from_torch(optimizer: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Return a class of torch.optim as a pure optimizer.

    SGD, Adam, AdamW and RMSprop are those of this package. Any other runs torch's own code on fresh
    copies; gradients flow through it to parameters, gradients and state, where torch's class has
    `differentiable=True`.

    Example:
        >>> import torch, gradkit
        >>> opt = gradkit.meta.from_torch(torch.optim.NAdam, lr=0.1)
        >>> w = torch.tensor([1.0])
        >>> opt.step(w, torch.tensor([2.0]), opt.init(w))[0]
        tensor([0.8944])

    Args:
        optimizer: The class.
        hyper: Its arguments. `foreach`, `fused`, `capturable` and `differentiable` are ignored.

    Returns:
        An `Optimizer` with the values of the class. The derivative of a square root at 0 is taken
        as 0.

    Raises:
        OptionError: The class has no such argument.
        UnsupportedOptimizerError: The class cannot be a pure function, or a hyper-parameter
            requires grad that torch would drop or get wrong. `step` raises it, too, when gradients
            flow through a class without `differentiable=True`, or a subclass of SGD.

    Source:
        `torch.optim`, https://pytorch.org/docs/stable/optim.html
    """
    _check_class(optimizer)
    hyper = {name: value for name, value in hyper.items() if name not in _IMPLEMENTATION}
    defaults = _defaults(optimizer)
    name = optimizer.__name__
    check_names(name, hyper, defaults, f"from_torch(torch.optim.{name}, lr=0.1)")
    if optimizer is torch.optim.Adam and hyper.pop("decoupled_weight_decay", False):
        optimizer = torch.optim.AdamW
        hyper = {"weight_decay": 0.0, **hyper}  # Adam's default; AdamW's differs
    if optimizer in _REIMPLEMENTED:
        return _REIMPLEMENTED[optimizer](**hyper)
    _check_hyper(name, hyper)
    rule = partial(_rule, optimizer, _is_differentiable(optimizer))
    settings = {**defaults, **hyper}
    return Optimizer(name, settings, {"torch": lambda leaf: {}}, rule, scalar_hyperparams=True)


def _defaults(optimizer: OptimizerClass) -> dict[str, Any]:
    parameters = inspect.signature(optimizer).parameters
    hidden = {"params", *_IMPLEMENTATION}
    return {name: parameters[name].default for name in parameters if name not in hidden}


def _is_differentiable(optimizer: OptimizerClass) -> bool:
    # A subclass of SGD has torch's first momentum step, which drops its gradient [T4].
    known = inspect.signature(optimizer).parameters
    return "differentiable" in known and not issubclass(optimizer, torch.optim.SGD)


def _rule(
    optimizer: OptimizerClass,
    is_differentiable: bool,
    params: Tensors,
    grads: Tensors,
    state: Columns,
    hyper: Mapping[str, Any],
) -> tuple[Tensors, Columns]:
    name = optimizer.__name__
    _check_hyper(name, hyper)
    states = state["torch"]
    differentiable = _needs_graph((params, grads, states, dict(hyper)))
    if differentiable and not is_differentiable:
        expected = "an optimizer that torch can differentiate"
        got = "one without differentiable=True, or a subclass of SGD, whose first step torch "
        got += "cuts off; and gradients that require grad"
        fix = "call it under torch.no_grad(), or use another optimizer"
        raise UnsupportedOptimizerError(message(name, expected, got, fix))
    try:
        new, after = torch_step(
            optimizer, params, grads, states, hyper, differentiable=differentiable
        )
    except (RuntimeError, IndexError) as error:
        if not transforms() or isinstance(error, GradkitError):
            raise
        expected = "an optimizer that runs inside torch.func's transforms"
        got = f"one that does not: {str(error).partition(chr(10))[0]}"
        fix = "use sgd, adam, adamw or rmsprop"
        raise UnsupportedOptimizerError(message(name, expected, got, fix)) from error
    return new, {"torch": after}


def _needs_graph(inputs: Any) -> bool:
    return torch.is_grad_enabled() and (
        differentiated() or any(x.requires_grad for x in open_tensors(inputs)[0])
    )


def _check_class(optimizer: object) -> None:
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    name = optimizer.__name__ if isinstance(optimizer, type) else ""
    if not is_class or name in _REFUSED:
        expected = "a class of torch.optim that is a function of gradients"
        got = f"{name}: {_REFUSED[name]}" if is_class else describe(optimizer)
        fix = "torch.optim.Adam, say: the class, not an instance"
        raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _check_hyper(name: str, hyper: Mapping[str, Any]) -> None:
    for key, value in hyper.items():
        where = f"{key} of {name}"
        if isinstance(value, Mapping | list):
            expected, got = "one value for all leaves", "a tree of several"
            fix = "use sgd, adam, adamw or rmsprop, which take one for each leaf"
            raise UnsupportedOptimizerError(message(where, expected, got, fix))
        values = value if isinstance(value, tuple) else (value,)
        learned = [value for value in values if _is_learned(value)]
        if learned and key not in _DIFFERENTIABLE.get(name, ()):
            expected = (
                "a number: torch drops the gradient of this hyper-parameter, or gets it wrong"
            )
            fix = "pass a number, or use sgd, adam, adamw or rmsprop, which keep every gradient"
            raise UnsupportedOptimizerError(message(where, expected, describe(learned[0]), fix))


def _is_learned(value: object) -> bool:
    return isinstance(value, Tensor) and (
        value.requires_grad or is_differentiated_tensor(value) or is_dual(value)
    )
