"""Private names of torch.optim and torch.amp, for a step. Run on torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer, optimizer


def has_step_hooks(instance: Optimizer) -> bool:
    """Return whether code of the user's runs before or after a step."""
    return bool(
        instance._optimizer_step_pre_hooks
        or instance._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
    )


def is_step_of_class(instance: Any) -> bool:
    """Return whether `step` is that of the class, or a scheduler's around it."""
    own = vars(instance)
    return "step" not in own or getattr(own["step"], "_wrapped_by_lr_sched", False)


def is_unscaled(scaler: GradScaler, instance: Optimizer) -> bool:
    """Return whether `scaler.unscale_` has been called in this step."""
    if not scaler.is_enabled():  # it has no states, and unscales nothing
        return False
    return bool(scaler._per_optimizer_states[id(instance)]["stage"] is OptState.UNSCALED)


@contextmanager
def scaler_put_back_on_error(scaler: GradScaler, instance: Optimizer) -> Iterator[None]:
    """Let a scaler forget, if the block raises, that it has unscaled an optimizer's gradients."""
    if not scaler.is_enabled():
        yield
        return
    states, key = scaler._per_optimizer_states, id(instance)
    before = dict(states[key]) if key in states else None
    infs = dict(before["found_inf_per_device"]) if before is not None else {}
    try:
        yield
    except BaseException:
        if before is None:
            states.pop(key, None)
        else:
            states[key] = {**before, "found_inf_per_device": infs}
        raise
