"""Operations by name, and what becomes of them where torch.compile traces.

Some run by formulas there: torch differentiates a norm in forward mode by a decomposition that its
fake tensors refuse, and what is compiled of the second derivative of some losses writes on the
tangent of a constant. What no mode has seen is looked at afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_testing_overrides

from gradkit._compat.dynamo import is_higher_order, run_in_trace, trace_again_watched, traced_since
from gradkit._compat.transforms import (
    BATCH,
    FORWARD,
    apply_function,
    autograd_grad,
    derivatives_around,
    varies,
)
from gradkit._core import pytree
from gradkit._torch_bugs import attention, table
from gradkit._torch_bugs import foreign_operators as foreign
from gradkit._torch_bugs.foreign_operators import is_foreign
from gradkit.errors import UnsupportedGraphError, message


def _normalized(
    x: Tensor, dims: list[int], eps: float, weight: Tensor | None, bias: Tensor | None
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
    result = _normalized(groups, [-1], eps, None, None).reshape(input.shape)
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
        if running_mean is not None:  # the operation's, of constants: no derivative counts there
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
TRACED_BY_FORMULA: dict[str, Callable[..., Any]] = {one.__name__: one for one in _ALL}
_NAMES = {getattr(functional, name): name for name in TRACED_BY_FORMULA}
_NAMES |= {torch.layer_norm: "layer_norm", torch.group_norm: "group_norm"}


@run_in_trace
def traced_by_formula(func: Callable[..., Any]) -> str | None:
    """Return the name of the formula by which an operation is to be traced here, if it has one."""
    stack, name = derivatives_around(), _NAMES.get(func)
    # The statistics of one sample are refused where the operation itself is seen.
    return None if FORWARD not in stack or (BATCH in stack and name == "batch_norm") else name


BACKWARD_PASS, FUNCTION, ATTENTION = "a backward pass", "a Function", "attention"
_TABLE_NAMES: dict[Any, str] = {
    getattr(owner, alias): name
    for alias, name in table.ALIASES.items()
    for owner in (torch, Tensor, torch.linalg, torch.special, functional)
    if hasattr(owner, alias)
}
_TABLE_NAMES.pop(vars(torch.linalg).get("polar"), None)  # since torch 2.15, of a matrix
_TABLE_NAMES |= dict.fromkeys((torch.autograd.grad, autograd_grad), BACKWARD_PASS)
_TABLE_NAMES |= {apply_function: FUNCTION, **dict.fromkeys(attention.OPERATIONS, ATTENTION)}
# torch.compile does not find those of `**` among the keys of a dictionary.
_POW, IPOW = Tensor.__pow__, Tensor.__ipow__
FUNCTIONAL = {functional.batch_norm, functional.instance_norm}


@run_in_trace  # a key in a dictionary would be a guard for each operation, of which some fail
def name_of(func: Callable[..., Any]) -> str | None:
    """Return the name of an operation with a bug, however it is called."""
    name = _TABLE_NAMES.get(func)
    if name is None and (func is _POW or func is IPOW):
        return "pow"
    # torch.ops.aten.name; an operator of the user's may have the same.
    if (
        name is None
        and isinstance(func, (foreign.OVERLOAD, foreign.OPERATOR))
        and not is_foreign(func)
    ):
        packet = func.overloadpacket if isinstance(func, foreign.OVERLOAD) else func
        return table.ALIASES.get(packet.__name__)
    return name


@run_in_trace
def wrong_unseen(count: int, watches: bool, more: int, batches: bool) -> str | None:
    """Return what an error says of an operation traced since of which no mode was told."""
    # torch.compile tells a mode of no other functions than torch lists as overridable; a mode takes
    # longer than all else, so that there is none before an operation needs it.
    try:
        for func, args, kwargs, result in traced_since(count):
            if is_foreign(func):
                foreign.refuse_dropped(func, (args, kwargs), result, [])
                continue
            given = args, kwargs, func in FUNCTIONAL
            name, call = _TABLE_NAMES.get(func, ""), table.OpCall(*given, derivatives_around(), ())
            if func in get_testing_overrides() or func in _OPERATORS:
                if not watches and _is_to_be_watched(func, call, more, batches):
                    trace_again_watched()
                continue
            bug = table.EVERY.get(name)
            if bug is None:
                continue
            if any(map(varies, pytree.tensors((args, kwargs)))) and bug.wrong_now(call):
                if not watches:  # linspace is shown to a mode by its tensors
                    trace_again_watched()
                expected, name = "a function that torch.compile shows to a mode", func.__name__
                got = f"{name}, of which {bug.what}"
                fix = f"{bug.fix or f'the method x.{name}()'}; or leave the call uncompiled: "
                fix += "torch.compiler.disable(call)"
                raise UnsupportedGraphError(message(f"torch.{name}", expected, got, fix))
    except UnsupportedGraphError as error:
        return str(error)
    return None


# torch.compile traces these in place of `x ** y`.
_OPERATORS = {operator.pow: "pow", operator.ipow: "pow"}


def _is_to_be_watched(func: Any, call: table.OpCall, more: int, batches: bool) -> bool:
    """Return whether an operation that was traced has to be refused, or to run by a formula."""
    name = _OPERATORS.get(func) or name_of(func)
    if is_higher_order(func) or traced_by_formula(func) is not None:
        return True
    if name == ATTENTION:
        return attention.lacks_derivative(more)
    rows = table.BY_FORMULA.get(name or ""), table.REFUSED.get(name or "")
    return any(
        batches
        or BATCH in call.stack
        or row.wrong_now(call)
        or row.wrong_now(call.differentiated_by_eager_code())
        for row in rows
        if row is not None
    )
