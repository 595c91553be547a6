"""One step of a class of torch.optim on lists of tensors, as a pure function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import transforms
from gradkit._state.dot_grad import set_grad
from gradkit.meta._foreach import Tensors, safe_sqrt

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]

# What only the constructor reads, to make the first state.
_CONSTRUCTOR_ONLY = ("initial_accumulator_value",)


def torch_step(
    optimizer: OptimizerClass,
    params: Tensors,
    grads: Tensors,
    states: Sequence[dict[str, Any]],
    hyper: Mapping[str, Any],
    *,
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
    constants = {key: _number(hyper[key]) for key in _CONSTRUCTOR_ONLY if key in hyper}
    constants |= {key: flag for key, flag in flags.items() if key in known}
    opt = optimizer(params, **constants)
    # The rest is put in afterwards: the constructor looks at the values of numbers.
    opt.param_groups[0].update(hyper)
    return opt


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


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
