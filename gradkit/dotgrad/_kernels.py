"""A step of torch's own optimizers by their functional forms, without `.grad`.

Half of a small step is torch's bookkeeping, and one call of a kernel for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, optim
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.rmsprop import rmsprop
from torch.optim.rprop import rprop
from torch.optim.sgd import sgd

from gradkit._compat.autograd import increment_version, run_without_grad, storage_address
from gradkit._compat.modules import steps_as_torch
from gradkit._core.ownership import PLAIN_TYPES, is_laid_out
from gradkit.dotgrad._before_step import (
    device_of,
    dtype_of,
    flags_of,
    looked_at,
    params_of,
    states_fit,
    values_of,
)

Group: TypeAlias = dict[str, Any]
# Names of states in the order of the functional form's arguments; where an option is off: "".
States: TypeAlias = Callable[[Group], Sequence[str]]


class Kernel(NamedTuple):
    """The functional form of a class of torch.optim."""

    run: Callable[..., None]
    states: States
    options: Sequence[str]  # keyword arguments that are options of a group
    pairs: Sequence[tuple[str, str, str]] = ()  # an option of two values, and what these are called
    fixed: Sequence[str] = ("has_complex",)  # keyword arguments that are False


def _adam_states(group: Group) -> Sequence[str]:
    return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else "", "step"


def _rmsprop_states(group: Group) -> Sequence[str]:
    centered = "grad_avg" if group["centered"] else ""
    return "square_avg", centered, "momentum_buffer" if group["momentum"] > 0 else "", "step"


_COMMON = "lr", "weight_decay", "maximize"
_BETAS = (("betas", "beta1", "beta2"),)
_ADAM = Kernel(
    adam, _adam_states, (*_COMMON, "eps", "amsgrad", "fused", "decoupled_weight_decay"), _BETAS
)
# The foreach kernels of these optimizers give the same bits on the CPU in single and double
# precision, which tests/dotgrad/test_kernels.py runs; those of ASGD, NAdam and RAdam do not.
KERNELS: dict[Any, Kernel] = {
    optim.SGD: Kernel(
        sgd,
        lambda group: ("momentum_buffer",) if group["momentum"] else ("",),
        (*_COMMON, "momentum", "dampening", "nesterov", "fused"),
        fixed=("has_sparse_grad",),
    ),
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.RMSprop: Kernel(
        rmsprop, _rmsprop_states, (*_COMMON, "alpha", "eps", "momentum", "centered")
    ),
    optim.Adagrad: Kernel(
        adagrad,
        lambda _: ("sum", "step"),
        (*_COMMON, "lr_decay", "eps", "fused"),
        fixed=("has_complex", "has_sparse_grad"),
    ),
    optim.Adamax: Kernel(
        adamax, lambda _: ("exp_avg", "exp_inf", "step"), (*_COMMON, "eps"), _BETAS
    ),
    optim.Adadelta: Kernel(
        adadelta, lambda _: ("square_avg", "acc_delta", "step"), (*_COMMON, "rho", "eps")
    ),
    optim.Rprop: Kernel(
        rprop,
        lambda _: ("prev", "step_size", "step"),
        ("maximize",),
        (("etas", "etaminus", "etaplus"), ("step_sizes", "step_size_min", "step_size_max")),
    ),
}
# Slices of the foreach kernels: what these have in memory at once stays in the caches. Unsliced,
# Adam takes 15.3 ms and 21 MB for parameters of 20 MB, a loop 10.7 ms, and slices 9.3 ms.
_FEW, _MOST_ELEMENTS = 8, 1 << 18
_FOREACH_DTYPES = ({torch.float32}, {torch.float64})
_NUMBERS = frozenset({float, int})
_CPU = {torch.device("cpu")}
_dtype, _device, _layout = map(attrgetter, ("dtype", "device", "layout"))
_is_given = partial(is_not, None)
_is_contiguous = Tensor.is_contiguous


def step_by_kernels(optimizer: Any, grads: Sequence[Tensor | None], *, may_write: bool) -> bool:
    """Step as `optimizer.step()` would with these as `.grad`; return False if not sure of that."""
    # `grads`: one for each parameter of the groups, in order: dense, of the shape, strides and
    # dtype of the parameter, in memory of its own. The step writes on it only if it `may_write`.
    kernel, own = KERNELS.get(type(optimizer)), vars(optimizer)
    if kernel is None or "grad_scale" in own or "found_inf" in own or not steps_as_torch(optimizer):
        return False
    calls: list[Callable[[], None]] = []
    groups, start = optimizer.param_groups, 0
    # The kernels run only while the states are those of the last look. `seen` is what
    # `what_is_stepped` of _before_step.py returns, in the same order, with fewer Python calls.
    owned, (states,) = [*chain(*map(params_of, groups))], map(values_of, (optimizer.state,))
    try:
        ids, flags = map(id, chain(owned, *map(values_of, states))), map(flags_of, groups)
        seen = (*ids, *map(dtype_of, owned), *map(device_of, owned[:1]), *flags)
    except (AttributeError, RuntimeError, TypeError):  # an entry of the state is of no parameter
        return False
    is_known = seen in looked_at and looked_at[seen]() is optimizer
    if not is_known and not states_fit(optimizer, seen):
        return False
    for group in groups:
        stop = start + len(group["params"])
        some = grads if len(groups) == 1 else grads[start:stop]
        # Every call is made before the first is run.
        if not _add_calls(calls, kernel, group, some, optimizer.state, may_write):
            return False
        start = stop
    run_without_grad(calls)
    if "step" in own:  # a scheduler's, which notes that it was called
        optimizer._opt_called = True
    return True


def _add_calls(
    calls: list[Callable[[], None]],
    kernel: Kernel,
    group: Group,
    grads: Sequence[Tensor | None],
    state: Any,
    may_write: bool,
) -> bool:
    """Add the calls for a group; return False if `step()` might do something else."""
    if group.get("capturable") or group.get("differentiable") or type(group["lr"]) not in _NUMBERS:
        return False
    params: Sequence[Tensor] = group["params"]
    if type(None) in set(map(type, grads)):
        params = [*compress(params, map(_is_given, grads))]
        grads = [*filter(_is_given, grads)]
        if not grads:
            return True
    if not PLAIN_TYPES.issuperset(map(type, params)) or any(map(Tensor.is_complex, params)):
        return False
    if {*map(_layout, params), *map(_layout, grads)} != {torch.strided}:
        return False
    names = kernel.states(group)
    lists = _states(state, params, names)
    if lists is None:
        return False
    is_fused = group.get("fused")
    if is_fused:  # fused kernels go by memory, not by index, and count no version
        laid_out = [some for some, name in zip(lists, names, strict=True) if name not in _UNPAIRED]
        if not all(_are_paired(params, some) for some in (params, grads, *laid_out)):
            return False
        calls.append(partial(increment_version, params))
    options = dict(zip(kernel.options, map(group.__getitem__, kernel.options), strict=True))
    for name, first, second in kernel.pairs:
        options[first], options[second] = group[name]
    options |= dict.fromkeys(kernel.fixed, False)
    foreach, chosen = group["foreach"], False
    if foreach is None and not is_fused and set(map(_device, params)) == _CPU:
        # The CPU takes one parameter at a time, as torch chooses there; or the foreach kernels.
        foreach = chosen = (
            len(params) > _FEW
            and {*map(_dtype, params), *map(_dtype, grads)} in _FOREACH_DTYPES
            and (may_write or not group.get("nesterov"))
            # A param that shares memory with another is read after that was written on.
            and len(set(map(storage_address, params))) == len(params)
        )
    elif not may_write and group.get("nesterov") and foreach is not False:
        return False  # kernels add Nesterov's momentum to the gradients themselves
    options["foreach"] = foreach
    if not chosen:
        calls.append(partial(kernel.run, params, grads, *lists, **options))
        return True
    for part in _slices(params):
        parts = [some[part] for some in (params, grads, *lists)]
        calls.append(partial(kernel.run, *parts, **options))
    return True


def _states(
    state: dict[Tensor, dict[str, Any]], params: Sequence[Tensor], names: Sequence[str]
) -> list[list[Any]] | None:
    """Return the states of each name, in the order of params; None if one is not there."""
    every: Sequence[dict[str, Any]] = ()
    if any(names):
        if len(state) == len(params) and all(map(is_, state, params)):
            every = [*state.values()]
        else:
            every = [state.get(param, {}) for param in params]
    lists: list[list[Any]] = []
    for name in names:
        try:
            lists.append([*map(itemgetter(name), every)] if name else [])
        except KeyError:  # the first step makes it
            return None
    if not {Tensor}.issuperset(map(type, chain.from_iterable(lists))):
        return None
    if names == ("",):  # SGD without momentum
        return [[None] * len(params)]
    return lists


_UNPAIRED = frozenset({"", "step"})


def _are_paired(params: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether the elements of dense tensors lie in memory in the order of the params'."""
    are_contiguous = all(map(_is_contiguous, params)) and all(map(_is_contiguous, others))
    return are_contiguous or all(map(is_laid_out, map(Tensor.detach, others), params))


def _slices(params: Sequence[Tensor]) -> Iterator[slice]:
    sizes = list(map(Tensor.numel, params))
    start, elements = 0, 0
    for index, size in enumerate(sizes):
        if index > start and elements + size > _MOST_ELEMENTS:
            yield slice(start, index)
            start, elements = index, 0
        elements += size
    yield slice(start, None)
