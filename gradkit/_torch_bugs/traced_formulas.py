"""Formulas of operations whose forward-mode derivative torch.compile cannot trace.

torch differentiates a norm there by a decomposition that its fake tensors refuse, and what is
compiled of the second derivative of some losses writes on the tangent of a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradkit._compat.dynamo import run_in_trace
from gradkit._compat.transforms import BATCH, FORWARD, derivatives_around


def _normalized(
    x: Tensor, dims: Sequence[int], eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return a tensor normalized over some dimensions, scaled and shifted."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))  # as torch's kernels do
    centred = exact - exact.mean(dims, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return _scaled(result, weight, bias).to(x.dtype)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _of_channels(x: Tensor, *of_each: Tensor | None) -> list[Tensor | None]:
    """Return a value for each channel in the shape in which all of a batch have it."""
    shape = -1, *[1] * (x.dim() - 2)
    return [one if one is None else one.reshape(shape) for one in of_each]


def layer_norm(
    _: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, *unused: Any,
) -> Tensor:  # fmt: skip
    """Return what torch.nn.functional.layer_norm does."""
    return _normalized(input, [*range(-len(normalized_shape), 0)], eps, weight, bias)


def group_norm(
    _: Any, input: Tensor, num_groups: int, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5, *unused: Any,
) -> Tensor:  # fmt: skip
    """Return what torch.nn.functional.group_norm does."""
    groups = input.reshape(input.shape[0], num_groups, -1)
    result = _normalized(groups, (-1,), eps, None, None).reshape(input.shape)
    return _scaled(result, *_of_channels(input, weight, bias)).to(input.dtype)


def batch_norm(
    operation: Callable[..., Tensor], input: Tensor, running_mean: Tensor | None,
    running_var: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return what torch.nn.functional.batch_norm does, which writes on the statistics."""
    dims = [0, *range(2, input.dim())]
    scale = _of_channels(input, weight, bias)
    if training:
        if running_mean is not None:  # by the operation, of constants: no derivative counts there
            constants = input.detach(), running_mean, running_var, None, None, True, momentum, eps
            operation(*constants)
        return _normalized(input, dims, eps, *scale)
    mean, var = _of_channels(input, running_mean, running_var)
    assert mean is not None and var is not None  # noqa: PT018
    return _scaled((input - mean) * torch.rsqrt(var + eps), *scale).to(input.dtype)


def instance_norm(
    operation: Callable[..., Tensor], input: Tensor, running_mean: Tensor | None = None,
    running_var: Tensor | None = None, weight: Tensor | None = None, bias: Tensor | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return what torch.nn.functional.instance_norm does."""
    if running_mean is not None:
        given = running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        return operation(input, *given)
    scale = _of_channels(input, weight, bias)
    return _normalized(input, [*range(2, input.dim())], eps, *scale)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def mse_loss(
    operation: Any, input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", weight: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return what torch.nn.functional.mse_loss does."""
    if size_average is not None or reduce is not None or weight is not None:
        options = {} if weight is None else {"weight": weight}
        return operation(input, target, size_average, reduce, reduction, **options)
    return _reduced((input - target).square(), reduction)


def soft_margin_loss(
    operation: Any, input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Return what torch.nn.functional.soft_margin_loss does."""
    if size_average is not None or reduce is not None:
        return operation(input, target, size_average, reduce, reduction)
    return _reduced(-functional.logsigmoid(input * target), reduction)


def huber_loss(
    operation: Any, input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0,
    weight: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return what torch.nn.functional.huber_loss does."""
    if weight is not None:
        return operation(input, target, reduction, delta, weight)
    difference = input - target
    size = difference.abs()
    far = delta * (size - 0.5 * delta)
    return _reduced(torch.where(size < delta, 0.5 * difference.square(), far), reduction)


_ALL = (layer_norm, group_norm, batch_norm, instance_norm, mse_loss, soft_margin_loss, huber_loss)
FORMULAS: dict[str, Callable[..., Any]] = {one.__name__: one for one in _ALL}
_NAMES = {getattr(functional, name): name for name in FORMULAS}
_NAMES |= {torch.layer_norm: "layer_norm", torch.group_norm: "group_norm"}


@run_in_trace
def traced_by_formula(func: Callable[..., Any]) -> str | None:
    """Return the name of the formula by which an operation is to be traced here, if it has one."""
    stack, name = derivatives_around(), _NAMES.get(func)
    # The statistics of one sample are refused where the operation itself is seen.
    return None if FORWARD not in stack or (BATCH in stack and name == "batch_norm") else name
