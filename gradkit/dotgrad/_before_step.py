"""What is looked at before a step: scaled losses, a scaler's stage, and states of torch.optim.

Torch finds most of it when half of the step is taken, and some of it not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from sys import getrefcount
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd.graph import Node

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.modules import is_step_of_class
from gradkit._compat.nodes import node_type, second_factor
from gradkit._core.call import Losses
from gradkit._core.ownership import PLAIN_TYPES, empty_for, is_laid_out
from gradkit.errors import OptionError, StructureError, UnsupportedOptimizerError, describe, message

MUL: Any = node_type("MulBackward0")  # of `loss * scale`
# The nodes that end a sum of losses, or a part of one (TERMS), and a sum of a stack (REDUCED).
TERMS = {MUL, *(node_type(f"{name}Backward0") for name in ("Add", "Sub", "Div", "Neg"))}
REDUCED = {node_type("SumBackward0"), node_type("MeanBackward0")}
STACKED: Any = node_type("StackBackward0")
_SUMS = (
    "Add", "Sub", "Rsub", "Neg", "Mul", "Div", "Sum", "Mean", "Stack", "Cat", "Select", "Unbind",
    "Dot", "Mv", "View", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Alias", "Clone", "ToCopy",
)  # fmt: skip
_MOST_NODES = 1000  # a sum of losses has fewer; what is below them is not read


def refuse_scaled(losses: Losses, scaler: GradScaler | None, optimizers: Sequence[Any]) -> None:
    """Raise if a loss, or a part of the sum that it is, comes from a GradScaler's `scale`."""
    if scaler is not None:
        check_scaler(scaler, optimizers, "minimize_")
    elif any(map(_may_unscale, optimizers)):
        return
    for index, loss in enumerate(losses.leaves):
        if _is_scaled(loss.grad_fn, scaler):
            expected = "a loss that is not scaled: minimize_ with scaler= scales by itself"
            twice = "the step would not be unscaled" if scaler is None else "scaled twice then"
            got, fix = f"{describe(loss)} of scaler.scale, {twice}", "with the loss itself: "
            fix += "gradkit.minimize_(optimizer, loss, scaler=scaler)"
            raise OptionError(message(losses.path(index), expected, got, fix))


def _is_scaled(root: Node | None, scaler: GradScaler | None) -> bool:
    nodes, seen = [root], set[Node]()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) is MUL and _has_scale(node, scaler):
            return True
        if node.name().startswith(_SUMS):
            nodes += [child for child, _ in node.next_functions]
    return False


def _has_scale(node: Any, scaler: GradScaler | None) -> bool:
    """Return whether the factor that a product has saved is the scale of a GradScaler."""
    factor = second_factor(node)  # also if its scaler's update() has written on it since
    is_scalar = type(factor) is Tensor and factor.dim() == 0 and not factor.is_meta
    if not is_scalar:
        return False
    if factor.dtype == torch.float64:  # a number, as get_scale() returns, for which a device waits
        return scaler is not None and 1 < factor.item() == scaler.get_scale()
    if factor.dtype != torch.float32:
        return False
    # torch saves a copy of the scale for a list of losses. A scale of 1 does no harm.
    scales = [one._scale for one in [*_living_scalers(), scaler] if one and one._scale is not None]
    is_one = any(factor is scale for scale in scales)
    return is_one or any(1 != factor.item() == scale.item() for scale in scales)


def _living_scalers() -> list[GradScaler]:
    """Return the GradScalers of the process."""
    # All objects of the process are gone through once: a scaler refers to its class.
    global _scalers
    kinds: list[Any] = [GradScaler]
    for kind in kinds:  # the list grows meanwhile
        kinds += kind.__subclasses__()
    counts, scalers = [*map(getrefcount, kinds)], [known() for known in _scalers[1]]
    if counts != _scalers[0] or None in scalers:
        scalers = [x for x in gc.get_referrers(*kinds) if isinstance(x, GradScaler)]
        _scalers = counts, [*map(ref, scalers)]
    return [x for x in scalers if x is not None]


_scalers: tuple[list[int], list[Any]] = [], []  # how often their classes were referred to, and they


def _may_unscale(optimizer: Any) -> bool:
    """Return whether the step of an optimizer may unscale by itself, as a wrapper's does."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", True)
    is_own = not type(optimizer).step.__module__.startswith(_OPTIM)
    return bool(is_own or hooks or "grad_scale" in vars(optimizer))


def check_scaler(scaler: GradScaler, optimizers: Sequence[Any], call: str) -> None:
    """Raise if a scaler cannot step these optimizers, before anything has run."""
    if not scaler.is_enabled():
        return
    if call == "step_" and scaler._scale is None:
        fix = "_, grads = gradkit.value_and_grads(scaler.scale(loss), params), and these to step_"
        got = "one that has scaled nothing: the gradients are those of an unscaled loss"
        raise OptionError(message("scaler", "one that has scaled the losses", got, fix))
    stepped = set[int]()
    for optimizer in optimizers:
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        name, stage = type(optimizer).__name__, state.get("stage")
        if stage is OptState.STEPPED or id(optimizer) in stepped:
            got = f"a second step of the same {name} without scaler.update() in between"
            fix = "call scaler.update() after each step; for one step down several losses, "
            fix += "gradkit.minimize_(optimizer, [loss, other], scaler=scaler)"
            raise OptionError(message("scaler", "one step, then an update", got, fix))
        stepped.add(id(optimizer))
        if call == "minimize_" and stage is OptState.UNSCALED and state["found_inf_per_device"]:
            got = (
                f"scaler.unscale_(optimizer) of the .grad of {name}, which minimize_ does not read"
            )
            fix = "leave out scaler.unscale_(optimizer): minimize_ unscales, and max_norm= clips; "
            fix += "scaler.update() ends the step that it has begun"
            raise OptionError(message("scaler", "no unscale_ before the call", got, fix))
        fused = [group.get("fused") for group in optimizer.param_groups]
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not all(fused):
            expected = "fused=True in all groups of an optimizer that was made with fused=True"
            got = f"{name} with fused off, as from a loaded state: its step cannot unscale"
            fix = 'saved["param_groups"][0]["fused"] = True before optimizer.load_state_dict(saved)'
            fix += ", or an optimizer that is made with fused=False"
            raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


_OPTIM = "torch.optim"
values_of: Any = methodcaller("values")
params_of, flags_of = itemgetter("params"), methodcaller("get", "fused")
dtype_of, device_of = attrgetter("dtype"), attrgetter("device")
_ONE_NUMBER = frozenset({"step", "mu_product", "eta", "mu"})
# States of these names have the parameter's shape; torch's lerp_ takes its own dtype only.
_LERPED = frozenset({"exp_avg", "grad_avg", "variance", "row_var", "col_var"})
_SHAPED = _LERPED | {
    "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum",
    "prev", "step_size", "ax",
}  # fmt: skip
_NEEDED = {
    "Adam": "step exp_avg exp_avg_sq", "AdamW": "step exp_avg exp_avg_sq",
    "Adamax": "step exp_avg exp_inf", "NAdam": "step mu_product exp_avg exp_avg_sq",
    "RAdam": "step exp_avg exp_avg_sq", "RMSprop": "step square_avg", "Adagrad": "step sum",
    "Adadelta": "step square_avg acc_delta", "Rprop": "step prev step_size",
    "ASGD": "step eta mu ax", "Adafactor": "step", "SparseAdam": "step exp_avg exp_avg_sq",
}  # fmt: skip
# The keys are what was there when each state of an optimizer fitted; the values refer to it.
looked_at: dict[tuple[Any, ...], Any] = {}


def what_is_stepped(optimizer: Any) -> tuple[Any, ...]:
    """Return what tells whether a parameter, a state or the kernel is another than before."""
    groups, (states,) = optimizer.param_groups, map(values_of, (optimizer.state,))
    owned = [*chain(*map(params_of, groups))]
    try:
        ids: list[Any] = [*map(id, chain(owned, *map(values_of, states)))]
    except (AttributeError, RuntimeError, TypeError):  # an entry of the state is of no parameter
        ids = [object()]
    flags = map(flags_of, groups)
    return (*ids, *map(dtype_of, owned), *map(device_of, owned[:1]), *flags)


def look_at_states(optimizers: Sequence[Any]) -> bool:
    """Raise if a step would fail half way; lay out fused states; return whether any is fused."""
    is_fused = False
    for optimizer in optimizers:
        if type(optimizer).step.__module__.startswith(_OPTIM):
            seen = what_is_stepped(optimizer)
            if seen not in looked_at or looked_at[seen]() is not optimizer:
                states_fit(optimizer, seen, refuse=True)
        for group in getattr(optimizer, "param_groups", ()):
            if group.get("fused"):
                is_fused = True
                _lay_out(group, optimizer)
    return is_fused


def states_fit(optimizer: Any, seen: tuple[Any, ...], *, refuse: bool = False) -> bool:
    """Return whether every state is like its parameter; or raise if a step would fail half way."""
    # A subclass of torch's class steps by its rule, if it has no own.
    kind = next(x.__name__ for x in type(optimizer).__mro__ if x.__module__.startswith(_OPTIM))
    are_alike = is_step_of_class(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        needed = _NEEDED.get(kind, "").split()
        needed += ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
        for index, param in enumerate(group["params"]):
            state = optimizer.state.get(param) or {}
            missing = [(name, None) for name in needed if state and name not in state]
            for name, entry in chain(missing, state.items()):
                expected, fails = _expected(kind, group, param, name, entry)
                are_alike = are_alike and not expected
                if expected and fails and refuse and param.grad is not None:
                    where = f"optimizer.param_groups[{number}]['params'][{index}]"
                    fix = "optimizer.load_state_dict(optimizer.state_dict()) casts a state; or "
                    if is_dtensor(param):
                        fix = "torch.distributed.checkpoint.state_dict shards a whole state; or "
                    fix += f"optimizer.state.pop({where}), and it starts anew"
                    where += f", its state {name!r}"
                    raise StructureError(message(where, expected, describe(entry), fix))
    if are_alike:
        if len(looked_at) > 100:
            looked_at.clear()
        looked_at[seen] = ref(optimizer)
    return are_alike


def _expected(kind: str, group: Any, param: Tensor, name: str, entry: Any) -> tuple[str, bool]:
    """Return what a state should be, if it is not that, and whether torch's step fails then."""
    is_fused = bool(group.get("fused"))
    is_tensor = isinstance(entry, Tensor)
    if name in _ONE_NUMBER:
        if kind == "SparseAdam":
            return "", False
        dtypes = {torch.float32} if is_fused else {torch.float32, torch.float64}
        needs_device = is_fused or group.get("capturable")
        if not is_tensor or entry.numel() != 1:
            return "a tensor of one element", True
        if entry.dtype not in dtypes or (needs_device and entry.device != param.device):
            return f"a count in float32 on {param.device}, for this step", is_fused
        return "", False
    if name not in _SHAPED or (entry is None and kind in {"SGD", "Adafactor"}):
        return "", False
    shape = list(param.shape)
    if name in {"row_var", "col_var"} and param.dim() > 1:
        shape[-1 if name == "row_var" else -2] = 1
    if is_dtensor(param) and not is_dtensor(entry):
        return f"a DTensor of shape {tuple(shape)}, as the parameter is", True
    if not is_tensor or list(entry.shape) != shape:
        return f"a tensor of shape {tuple(shape)}", True
    if entry.dtype != param.dtype or entry.device != param.device:
        needs_dtype = is_fused or kind == "Muon" or (name in _LERPED and kind != "SparseAdam")
        if entry.dtype == torch.float16 and kind != "SparseAdam":  # foreach kernels do not take it
            foreach = group.get("foreach")
            needs_dtype |= bool(foreach) or (foreach is None and param.device.type != "cpu")
        expected = f"{describe(param).split(' of ')[0]}, as the parameter"
        return expected, needs_dtype or entry.device != param.device
    return "", False


def _lay_out(group: dict[str, Any], optimizer: Any) -> None:
    """Give the states of a fused step, which pairs memory and not indices, the params' strides."""
    for index, param in enumerate(group["params"]):
        if type(param) not in PLAIN_TYPES or param.grad is None:
            continue
        if not is_laid_out(param.detach(), param):
            expected, where = "a dense parameter, for fused=True", f"group['params'][{index}]"
            got = f"one with the strides {param.stride()}: the step writes beside its elements"
            fix = "fused=False, or a contiguous parameter"
            raise UnsupportedOptimizerError(message(where, expected, got, fix))
        for name, entry in optimizer.state.get(param, {}).items():
            if name in _SHAPED and entry is not None and not is_laid_out(entry, param):
                entry.data = empty_for(param, entry.dtype).copy_(entry)
