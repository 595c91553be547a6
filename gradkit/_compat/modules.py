"""torch's private names for modules, optimizers and AMP. Run on torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.utils import parametrize
from torch.optim import Optimizer, optimizer

from gradkit._compat.undoing import INSIDE, undone


def lists_as_torch(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class list their parameters as `torch.nn.Module` does."""
    return (
        kind.named_parameters is _NAMED_PARAMETERS
        and kind.named_modules is _NAMED_MODULES
        and kind._named_members is _NAMED_MEMBERS
        # A scripted module keeps its parameters elsewhere.
        and (kind in OF_TORCH_NN or torch.jit.ScriptModule not in kind.__mro__)
    )


_NAMED_PARAMETERS, _NAMED_MODULES = nn.Module.named_parameters, nn.Module.named_modules
_NAMED_MEMBERS = nn.Module._named_members
# The classes of torch.nn.modules neither reduce nor shard gradients.
OF_TORCH_NN = frozenset(
    each
    for each in vars(nn.modules).values()
    if isinstance(each, type) and issubclass(each, nn.Module)
)


def own_parametrized_values() -> AbstractContextManager[None]:
    """Return what keeps a call's computed weights apart, inside of `parametrize.cached()`."""
    # The cache goes by module and name, whatever the tensors are that it was computed from.
    return _own_cache() if parametrize._cache_enabled else INSIDE


@contextmanager
def _own_cache() -> Iterator[None]:
    with undone(partial(setattr, parametrize, "_cache", parametrize._cache)):
        parametrize._cache = {}
        yield


def is_step_of_class(instance: Any) -> bool:
    """Return whether `step` is that of the class, or a scheduler's around it."""
    own = vars(instance)
    return "step" not in own or _is_schedulers(own["step"], type(instance).step)


def _is_schedulers(step: Any, of_class: Any) -> bool:
    """Return whether this only notes that the step of the class is called."""
    is_marked = getattr(step, "_wrapped_by_lr_sched", False)
    return is_marked and getattr(step, "__wrapped__", None) is of_class


_TORCH_OPTIM = str(optimizer.__file__).removesuffix("optimizer.py")


def steps_as_torch(instance: Any) -> bool:
    """Return whether `step()` is torch's own method alone: no other, no hooks and no profiler."""
    # All is in one function: each further one takes half a microsecond beside a small step.
    own, step = vars(instance), type(instance).step
    return (
        ("step" not in own or _is_schedulers(own["step"], step))
        and (step in _torchs_steps or _is_torchs(step))
        and not instance._optimizer_step_pre_hooks
        and not instance._optimizer_step_post_hooks
        and not optimizer._global_optimizer_pre_hooks
        and not optimizer._global_optimizer_post_hooks
        and not torch.autograd.profiler._is_profiler_enabled
    )


_torchs_steps: set[Any] = set()  # the steps that have been looked at
# Optimizer.__init__ makes it of the method, profile_hook_step(use_grad(method)):
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L567
_WRAPPERS = "profile_hook_step.<locals>.wrapper", "_use_grad"


def _is_torchs(step: Any) -> bool:
    method = step
    for name in _WRAPPERS:
        code = getattr(method, "__code__", None)
        if code is None or code.co_filename != optimizer.__file__:
            return False
        if not code.co_qualname.endswith(name):
            return False
        method = getattr(method, "__wrapped__", None)
    code = getattr(method, "__code__", None)
    if code is None or not code.co_filename.startswith(_TORCH_OPTIM):
        return False
    _torchs_steps.add(step)
    return True


def is_unscaled(scaler: GradScaler, key: int) -> bool:
    """Return whether `scaler.unscale_` has been called in this step of the optimizer of this id."""
    if not scaler.is_enabled():  # such a scaler has no states, and unscales nothing
        return False
    state = scaler._per_optimizer_states.get(key, {})
    return state.get("stage") is OptState.UNSCALED


# Attributes by which scaler.step() tells a fused step what to do; if that raises, they stay.
_OF_AMP = frozenset({"grad_scale", "found_inf"})


@contextmanager
def scaler_put_back_on_error(scaler: GradScaler, instances: Sequence[Optimizer]) -> Iterator[None]:
    """Put back, if the block raises, what a scaler notes of optimizers, in itself and on them."""
    if not scaler.is_enabled():
        yield
        return
    states = scaler._per_optimizer_states
    before = {
        key: {**states[key], "found_inf_per_device": dict(states[key]["found_inf_per_device"])}
        if key in states
        else None
        for key in map(id, instances)
    }
    # unscale_() has unscaled nothing where every .grad was None, and a step would raise:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/amp/grad_scaler.py#L475
    for key in before:
        if is_unscaled(scaler, key) and not states[key]["found_inf_per_device"]:
            del states[key]
    given = [(one, {k: v for k, v in vars(one).items() if k in _OF_AMP}) for one in instances]
    try:
        yield
    except BaseException:
        for one, attributes in given:
            for name in _OF_AMP - attributes.keys():
                vars(one).pop(name, None)
            vars(one).update(attributes)
        for key, state in before.items():
            if state is None:
                states.pop(key, None)
            else:
                states[key] = state
        raise
