"""Which optimizers are lent the caller's gradients: those that only read them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from gradkit._compat.optim import has_step_hooks, is_step_of_class
from gradkit._core.ownership import PLAIN_TYPES, is_laid_out
from gradkit._state.grad_writes import set_grad, write
from gradkit.dotgrad._matching import Pairs
from gradkit.errors import warn_fallback

# tests/dotgrad/test_lending.py runs each with the combinations of its options that are lent to. One
# that is not here is given copies: it may write on its gradients, or keep them.
_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
READERS = frozenset(getattr(optim, name) for name in _NAMES if hasattr(optim, name))
_version: Callable[[Tensor], int] = attrgetter("_version")
_address: Callable[[Tensor], int] = Tensor.data_ptr


def only_reads(optimizer: Any) -> bool:
    """Return whether a step leaves the gradients as they are, and keeps none of them."""
    return (
        type(optimizer) in READERS
        and is_step_of_class(optimizer)
        and not has_step_hooks(optimizer)  # a hook may clip in place
        and not any(map(_writes, optimizer.param_groups))
    )


def _writes(group: dict[str, Any]) -> bool:
    """Return whether a step with these options writes on gradients, or was not tried for it."""
    if group.get("differentiable") or group.get("capturable"):
        return True
    # SGD adds Nesterov's momentum to the gradient itself where it takes all parameters at once.
    if not group.get("nesterov") or group.get("foreach") is False:
        return False
    return bool(group.get("foreach")) or any(p.device.type != "cpu" for p in group["params"])


class Loan:
    """The `.grad` of a step: the caller's own gradients where that is safe, copies elsewhere."""

    def __init__(self, pairs: Pairs, *, lend: bool) -> None:
        self._lent: list[Tensor] = []
        # A gradient that is a parameter changes while the step still reads it.
        updated = set(map(_address, (leaf for leaf, _ in pairs))) if lend else set()
        for leaf, grad in pairs:
            if lend and grad is not None and _is_lendable(grad, leaf, updated):
                self._lent.append(grad)
                set_grad(leaf, grad.detach() if grad.requires_grad else grad)
            else:
                write(leaf, grad)
        self._versions = list(map(_version, self._lent))

    def warn_if_written(self, optimizer: Optimizer) -> None:
        """Warn if the step has changed a gradient of the caller's."""
        if list(map(_version, self._lent)) != self._versions:
            warn_fallback(
                f"{type(optimizer).__name__} has changed the gradients that step_ was given, and "
                "that gradkit takes for read-only. The step itself is right. Pass copies: "
                "gradkit.tree.map(torch.clone, grads)"
            )


def _is_lendable(grad: Tensor, leaf: Tensor, updated: set[int]) -> bool:
    return (
        type(grad) in PLAIN_TYPES
        and grad.layout == torch.strided
        and is_laid_out(grad, leaf)
        and _address(grad) not in updated
        and not grad.is_inference()
    )
