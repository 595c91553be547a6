"""Optimizers that Accelerate and Lightning have wrapped, where their `step()` is not one step."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import GradScaler

from gradkit.errors import UnsupportedOptimizerError, message

_STEPS = "an optimizer whose step() updates the parameters"


def check_wrapper(optimizer: Any, *, unscales_or_clips: bool) -> None:
    """Raise if the wrapper would drop the gradients, or unscale them once more."""
    name = type(optimizer).__name__
    # Accelerate's, by attribute: gradkit does not import it.
    if not getattr(getattr(optimizer, "gradient_state", None), "sync_gradients", True):
        got = f"{name}, which skips this step inside accumulate(): the gradients would be dropped"
        fix = "add up the gradients (gradkit.tree.add_), and step if accelerator.sync_gradients"
        raise UnsupportedOptimizerError(message("optimizer", _STEPS, got, fix))
    if type(optimizer).__module__ == "accelerate.utils.deepspeed":
        got = f"{name}, whose step() does nothing: DeepSpeed steps in accelerator.backward(loss)"
        fix = "train with DDP or fully_shard, or use accelerator.backward(loss) with DeepSpeed"
        raise UnsupportedOptimizerError(message("optimizer", _STEPS, got, fix))
    if unscales_or_clips and _own_scaler(optimizer) is not None:
        expected = "an optimizer that does not unscale, with scaler= or max_norm="
        got = f"{name}, whose step() unscales the gradients"
        fix = (
            "leave both out; to clip, pass "
            "gradkit.tree.clip_by_global_norm(grads, max_norm * scaler.get_scale())[0]"
        )
        raise UnsupportedOptimizerError(message("optimizer", expected, got, fix))


def _own_scaler(optimizer: Any) -> GradScaler | None:
    """Return the scaler of a wrapper of Accelerate, or of Lightning's precision plugin."""
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    scalers = (getattr(owner, "scaler", None) for owner in (optimizer, plugin))
    return next((scaler for scaler in scalers if isinstance(scaler, GradScaler)), None)
