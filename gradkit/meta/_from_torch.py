"""Any class of torch.optim as a pure optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import differentiated, is_differentiated_tensor, is_dual, transforms
from gradkit._state.grad_writes import set_grad
from gradkit.errors import GradkitError, UnsupportedOptimizerError, describe, message
from gradkit.meta._adaptive import adam, adamw, rmsprop
from gradkit.meta._foreach import Tensors, safe_sqrt
from gradkit.meta._optimizer import Columns, Optimizer, check_names
from gradkit.meta._sgd import sgd
from gradkit.meta._trees import open_tensors

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]

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

# What only the constructor reads, to make the first state.
_CONSTRUCTOR_ONLY = {"initial_accumulator_value"}


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
        new, after = _torch_step(optimizer, params, grads, states, hyper, differentiable)
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


def _torch_step(
    optimizer: OptimizerClass,
    params: Tensors,
    grads: Tensors,
    states: Sequence[dict[str, Any]],
    hyper: Mapping[str, Any],
    differentiable: bool,
) -> tuple[Tensors, list[dict[str, Any]]]:
    """Run torch's step on fresh copies, with an optimizer that is thrown away."""
    zeros = [torch.zeros_like(grad) for grad in grads]
    # p + 0 is a copy with the graph of p, and one that is batched if the gradient is.
    fresh = [p + z for p, z in zip(params, zeros, strict=True)]
    if not differentiable:
        fresh = [p.detach() for p in fresh]
    # What torch writes in place for speed has no rule in a transform.
    opt = _temporary(optimizer, fresh, hyper, differentiable or bool(transforms()))
    counters = _counters(cast("Hashable", optimizer))
    for p, grad, zero, state in zip(fresh, grads, zeros, states, strict=True):
        set_grad(p, grad.clone() if differentiable else grad.detach().clone())
        opt.state[p] = {
            key: _copy(value, zero, key in counters) if isinstance(value, Tensor) else value
            for key, value in (state or _first_state(optimizer, p, hyper)).items()
        }
    with warnings.catch_warnings(), _SafeSqrt():
        warnings.simplefilter("ignore")  # torch warns of the in-place writes that are meant here
        opt.step()
    for p in fresh:
        set_grad(p, None)
    return fresh, [dict(opt.state[p]) for p in fresh]


def _temporary(
    optimizer: OptimizerClass, params: Tensors, hyper: Mapping[str, Any], differentiable: bool
) -> torch.optim.Optimizer:
    known = inspect.signature(optimizer).parameters
    flags = {"foreach": False, "differentiable": differentiable}
    constants: dict[str, Any] = {key: flag for key, flag in flags.items() if key in known}
    for key in hyper.keys() & _CONSTRUCTOR_ONLY:
        value = hyper[key]
        is_number = isinstance(value, Tensor) and value.numel() == 1
        constants[key] = value.item() if is_number else value
    opt = optimizer(params, **constants)
    # The rest is put in afterwards: the constructor looks at the values of numbers.
    opt.param_groups[0].update(hyper)
    return opt


def _copy(value: Tensor, zero: Tensor, is_counter: bool) -> Tensor:
    # A counter is the same for all of a batch; torch reads it as a number.
    return value.clone() if is_counter or value.shape != zero.shape else value + zero


@cache
def _counters(optimizer: Any) -> frozenset[str]:
    """Return the names of the state entries that are one number for each leaf."""
    state = _torch_state(optimizer, torch.zeros(2, 2), {})
    return frozenset(k for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0)


def _first_state(
    optimizer: OptimizerClass, param: Tensor, hyper: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state that torch starts with, its counters in float64."""
    stand_in = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
    counters = _counters(cast("Hashable", optimizer))
    # In float32, as torch has them, 1 - 0.999 ** 1 is wrong in the fifth digit [T6].
    return {
        key: value.double() if key in counters and value.is_floating_point() else value
        for key, value in _torch_state(optimizer, stand_in, hyper).items()
    }


def _torch_state(
    optimizer: OptimizerClass, stand_in: Tensor, hyper: Mapping[str, Any]
) -> dict[str, Any]:
    set_grad(stand_in, torch.zeros_like(stand_in))
    opt = _temporary(optimizer, [stand_in], hyper, False)
    init_group: Callable[..., Any] | None = getattr(opt, "_init_group", None)
    if init_group is None:
        return {}
    with torch.no_grad():
        lists = len(inspect.signature(init_group).parameters) - 1
        init_group(opt.param_groups[0], *[[] for _ in range(lists)])
    return dict(opt.state[stand_in])


class _SafeSqrt(TorchFunctionMode):
    """Takes the derivative of a square root at 0 as 0, where torch's is infinite [T5]."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.sqrt, Tensor.sqrt) and len(args) == 1 and not kwargs:
            return safe_sqrt(args[0])
        return func(*args, **(kwargs or {}))
