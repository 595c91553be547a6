"""Any class of torch.optim as a pure optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import differentiated, is_dual, transforms
from gradkit._core import pytree
from gradkit.errors import (
    GradkitError,
    StructureError,
    UnsupportedOptimizerError,
    describe,
    message,
)
from gradkit.meta._arithmetic import Tensors, safe_sqrt
from gradkit.meta._optimizer import Optimizer
from gradkit.meta.optimizers import adam, adamw, rmsprop, sgd

_WRITTEN_OUT: Mapping[type, Callable[..., Optimizer]] = {
    torch.optim.SGD: sgd,
    torch.optim.Adam: adam,
    torch.optim.AdamW: adamw,
    torch.optim.RMSprop: rmsprop,
}
# How torch computes, not what.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_REFUSED = {
    "LBFGS": "it evaluates the loss itself, by a closure, as often as it likes",
    "SparseAdam": "it takes sparse gradients only, and updates where they are",
}
# Hyper-parameters through which torch's own code keeps the gradient right [T3].
_RIGHT = {"NAdam": {"lr", "momentum_decay"}, "RAdam": {"lr"}}


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
        An `Optimizer` with the values of the class. The derivative of a root of 0 is taken as 0.

    Raises:
        StructureError: The class has no such argument.
        UnsupportedOptimizerError: The class cannot be a pure function, or a hyper-parameter
            requires grad that torch would drop or get wrong. `step` raises it, too, when gradients
            flow through a class without `differentiable=True`, or a subclass of SGD.

    Source:
        `torch.optim`, https://pytorch.org/docs/stable/optim.html
    """
    _refuse_class(optimizer)
    hyper = {name: value for name, value in hyper.items() if name not in _IMPLEMENTATION}
    if optimizer is torch.optim.Adam and hyper.pop("decoupled_weight_decay", False):
        optimizer = torch.optim.AdamW
        hyper = {"weight_decay": 0.0, **hyper}  # as Adam has it; AdamW's own is another
    name = optimizer.__name__
    known = set(inspect.signature(optimizer).parameters)
    given = known - {"params", *_IMPLEMENTATION}
    _refuse_unknown(name, hyper, given)
    if optimizer in _WRITTEN_OUT:
        return _WRITTEN_OUT[optimizer](**hyper)
    _refuse_hyper(name, hyper)
    # A subclass of SGD has torch's first momentum step, which drops its gradient [T4].
    differentiable = "differentiable" in known and not issubclass(optimizer, torch.optim.SGD)
    settings = {**_defaults(optimizer, given), **hyper}

    def rule(
        params: Tensors, grads: Tensors, state: list[dict[str, Any]], h: Mapping[str, Any]
    ) -> tuple[Tensors, list[dict[str, Any]]]:
        _refuse_hyper(name, h)
        read = (params, grads, [entry["torch"] for entry in state], dict(h))
        flows = torch.is_grad_enabled() and (
            differentiated()
            or any(isinstance(x, Tensor) and x.requires_grad for x in pytree.flatten(read)[0])
        )
        if flows and not differentiable:
            raise UnsupportedOptimizerError(
                message(
                    name,
                    "an optimizer that torch can differentiate",
                    "one without differentiable=True, or a subclass of SGD, whose first step torch "
                    "cuts off; and gradients that require grad",
                    "call it under torch.no_grad(), or use another optimizer",
                )
            )
        try:
            return _stepped(optimizer, params, grads, [e["torch"] for e in state], h, flows)
        except (RuntimeError, IndexError) as error:
            if not transforms() or isinstance(error, GradkitError):
                raise
            raise UnsupportedOptimizerError(
                message(
                    name,
                    "an optimizer that runs inside of torch.func's transforms",
                    f"one that does not: {str(error).partition(chr(10))[0]}",
                    "use sgd, adam, adamw or rmsprop",
                )
            ) from error

    return Optimizer(name, settings, {"torch": lambda leaf: {}}, rule, scalar_hyperparams=True)


def _refuse_class(optimizer: object) -> None:
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    name = optimizer.__name__ if isinstance(optimizer, type) else ""
    if not is_class or name in _REFUSED:
        raise UnsupportedOptimizerError(
            message(
                "optimizer",
                "a class of torch.optim that is a function of gradients",
                f"{name}: {_REFUSED[name]}" if is_class else describe(optimizer),
                "torch.optim.Adam, say: the class, not an instance",
            )
        )


def _refuse_unknown(name: str, hyper: Mapping[str, Any], given: set[str]) -> None:
    unknown = [key for key in hyper if key not in given]
    if unknown:
        raise StructureError(
            message(
                unknown[0],
                f"an argument of {name}: {', '.join(sorted(given))}",
                "another name",
                f"from_torch(torch.optim.{name}, lr=0.1)",
            )
        )


def _refuse_hyper(name: str, hyper: Mapping[str, Any]) -> None:
    for key, value in hyper.items():
        if isinstance(value, Mapping | list):
            raise UnsupportedOptimizerError(
                message(
                    f"{key} of {name}",
                    "one value for all leaves",
                    "a tree of several",
                    "use sgd, adam, adamw or rmsprop, which take one for each leaf",
                )
            )
        learned = [v for v in (value if isinstance(value, tuple) else (value,)) if _is_learned(v)]
        if learned and key not in _RIGHT.get(name, ()):
            raise UnsupportedOptimizerError(
                message(
                    f"{key} of {name}",
                    "a number: torch drops the gradient of this hyper-parameter, or gets it wrong",
                    describe(learned[0]),
                    "pass a number, or use sgd, adam, adamw or rmsprop, which keep every gradient",
                )
            )


def _is_learned(value: object) -> bool:
    return isinstance(value, Tensor) and (
        value.requires_grad or torch._C._functorch.is_gradtrackingtensor(value) or is_dual(value)
    )


def _defaults(optimizer: type[torch.optim.Optimizer], names: set[str]) -> dict[str, Any]:
    signature = inspect.signature(optimizer).parameters
    return {name: signature[name].default for name in signature if name in names}


def _stepped(
    optimizer: type[torch.optim.Optimizer],
    params: Tensors,
    grads: Tensors,
    states: Sequence[dict[str, Any]],
    hyper: Mapping[str, Any],
    flows: bool,
) -> tuple[Tensors, list[dict[str, Any]]]:
    """Run torch's step on fresh copies, with an optimizer that is thrown away."""
    nothing = [torch.zeros_like(grad) for grad in grads]
    # p + 0 is a copy with the graph of p, and one that is batched if the gradient is.
    fresh = [p + z for p, z in zip(params, nothing, strict=True)]
    if not flows:
        fresh = [p.detach() for p in fresh]
    # What torch writes in place for speed has no rule in a transform.
    opt = _throwaway(optimizer, fresh, hyper, flows or bool(transforms()))
    counts = _counts(cast("Hashable", optimizer))
    for p, grad, z, state in zip(fresh, grads, nothing, states, strict=True):
        p.grad = grad.clone() if flows else grad.detach().clone()
        known = state or _first_state(optimizer, p, hyper)
        opt.state[p] = {
            key: _copied(value, z, key in counts) if isinstance(value, Tensor) else value
            for key, value in known.items()
        }
    with warnings.catch_warnings(), _SafeRoots():
        warnings.simplefilter("ignore")  # torch warns of writing where we have asked it to
        opt.step()
    after = [dict(opt.state[p]) for p in fresh]
    for p in fresh:
        p.grad = None
    return fresh, [{"torch": state} for state in after]


def _throwaway(
    optimizer: type[torch.optim.Optimizer], params: Tensors, hyper: Mapping[str, Any], flows: bool
) -> torch.optim.Optimizer:
    known = inspect.signature(optimizer).parameters
    flags: dict[str, Any] = {"foreach": False, "differentiable": flows}
    flags = {key: flag for key, flag in flags.items() if key in known}
    # The rest is put in afterwards: the constructor looks at the values of numbers.
    constant = {key: _number(hyper[key]) for key in _READ_ONCE if key in hyper}
    opt = optimizer(params, **constant, **flags)
    opt.param_groups[0].update(hyper)
    return opt


# What only the constructor reads, to make the first state.
_READ_ONCE = ("initial_accumulator_value",)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _copied(value: Tensor, nothing: Tensor, is_count: bool) -> Tensor:
    # A count is the same for all of a batch; torch reads it as a number.
    return value.clone() if is_count or value.shape != nothing.shape else value + nothing


@cache
def _counts(optimizer: Any) -> frozenset[str]:
    """Return the names of what torch holds as one number for each leaf."""
    state = _state_of(optimizer, torch.zeros(2, 2), {})
    return frozenset(k for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0)


def _first_state(
    optimizer: type[torch.optim.Optimizer], param: Tensor, hyper: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state that torch starts with, its counts in float64.

    In float32, as torch has them, 1 - 0.999 ** 1 is wrong in the fifth digit [T6].
    """
    stand_in = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
    counts = _counts(cast("Hashable", optimizer))
    return {
        key: value.double() if key in counts and value.is_floating_point() else value
        for key, value in _state_of(optimizer, stand_in, hyper).items()
    }


def _state_of(
    optimizer: type[torch.optim.Optimizer], stand_in: Tensor, hyper: Mapping[str, Any]
) -> dict[str, Any]:
    stand_in.grad = torch.zeros_like(stand_in)
    opt = _throwaway(optimizer, [stand_in], hyper, flows=False)
    init_group: Callable[..., Any] | None = getattr(opt, "_init_group", None)
    if init_group is None:
        return {}
    with torch.no_grad():
        lists = len(inspect.signature(init_group).parameters) - 1
        init_group(opt.param_groups[0], *[[] for _ in range(lists)])
    return dict(opt.state[stand_in])


class _SafeRoots(TorchFunctionMode):
    """Takes the derivative of a root of 0 as 0, where torch's is infinite [T5]."""

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
