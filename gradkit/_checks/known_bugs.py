"""The operations whose derivative torch.func gets silently wrong, and where it does.

Each entry is a defect of torch's own formulas or batching rules, in every release that gradkit runs
on but those from which on `MENDED` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from gradkit._compat.transforms import BATCH, DERIVATIVES, FORWARD
from gradkit._compat.versions import is_mended

Stack: TypeAlias = tuple[str, ...]
EAGER = "Grad"  # autograd, which is like a transform around all others


@dataclass(frozen=True)
class OpCall:
    """A call of an operation, and the transforms around it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    functional: bool  # of torch.nn.functional, whose arguments have another order
    stack: Stack  # the transforms around it, from the outermost
    outer: Stack  # those of them around the monitor

    def argument(self, position: int, name: str) -> Any:
        """Return an argument, None if it was left out."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    def differentiated_by_eager_code(self) -> OpCall:
        """Return the call as it is if eager code differentiates what the transforms give."""
        return replace(self, stack=(EAGER, *self.stack), outer=(EAGER, *self.outer))

    def differentiated_outside(self) -> bool:
        """Return whether a batched backward pass through the monitored function is possible."""
        return not DERIVATIVES.isdisjoint(self.outer)


def differentiated_around(stack: Stack, kind: str) -> bool:
    """Return whether a transform of this kind stands inside one that differentiates."""
    last = len(stack) - 1 - stack[::-1].index(kind) if kind in stack else 0
    return not DERIVATIVES.isdisjoint(stack[:last])


Condition: TypeAlias = Callable[[OpCall], bool]


@dataclass(frozen=True)
class KnownBug:
    """What torch gets wrong about an operation."""

    what: str
    fix: str  # what to write in its place
    wrong_now: Condition  # the call is wrong, or will be with the transforms around it
    wrong_batched: bool = False  # a batched backward pass through it is wrong
    wrong_derivative: Condition = lambda call: False  # so is the derivative of such a pass
    concerns: Condition = lambda call: True  # which calls of the operation have the bug


_NORM = KnownBug(
    "a derivative of a batched gradient, grad(vmap(grad(f))), or a third derivative, or one of a "
    "jvp, is silently wrong",
    "take every derivative inside of the vmap, two at most; or use group_norm or rms_norm",
    lambda call: (
        differentiated_around(call.stack, FORWARD)
        or sum(kind in DERIVATIVES for kind in call.stack) > 2
    ),
    wrong_derivative=lambda call: call.argument(3 if call.functional else 1, "weight") is not None,
)
_DETERMINANT = KnownBug(
    "the derivative of its jvp is silently wrong",
    "take the jvp of the gradient: hvp(f, primals, tangents)",
    lambda call: differentiated_around(call.stack, FORWARD),
)
_FORWARD = KnownBug(
    "its forward-mode derivative is silently wrong",
    'hvp(..., mode="reverse-over-reverse"), and grad or jacrev in place of jvp or jacfwd',
    lambda call: FORWARD in call.stack,
)
EVERY_BUG: dict[str, KnownBug] = {
    "cdist": KnownBug(
        "a batched backward pass through it is silently wrong",
        "(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)",
        OpCall.differentiated_outside,
        wrong_batched=True,
    ),
    "as_strided_scatter": KnownBug(
        "its derivative is silently wrong",
        "index_put, or torch.where",
        lambda call: (
            BATCH in call.stack
            or FORWARD in call.stack
            or call.differentiated_outside()
            or call.argument(0, "input").requires_grad
            or call.argument(1, "src").requires_grad
        ),
    ),
    "roll": KnownBug(
        "vmap gets it silently wrong for a tensor without dimensions",
        "leave it out: it moves nothing there",
        lambda call: BATCH in call.stack,
        wrong_batched=True,
        concerns=lambda call: call.argument(0, "input").dim() == 0,
    ),
    "masked_select": KnownBug(
        "a batched backward pass through it is silently wrong where it broadcasts",
        "expand the tensor to the shape of the mask first",
        OpCall.differentiated_outside,
        wrong_batched=True,
        concerns=lambda call: call.argument(0, "input").shape != call.argument(1, "mask").shape,
    ),
    "index_fill": KnownBug(
        "vmap gets it silently wrong for a value that is a tensor",
        "torch.where, or index_put",
        lambda call: BATCH in call.stack,
        wrong_batched=True,
        concerns=lambda call: isinstance(call.argument(3, "value"), Tensor),
    ),
    "select_scatter": KnownBug(
        "the derivative of its batching rule is silently wrong",
        "torch.where, or index_put; or take the gradient inside the vmap",
        lambda call: differentiated_around(call.stack, BATCH),
    ),
    "det": _DETERMINANT,
    "slogdet": _DETERMINANT,
    "logdet": _DETERMINANT,
    "cholesky_inverse": _FORWARD,
    "triangular_solve": _FORWARD,
    "scatter_reduce": replace(_FORWARD, concerns=lambda call: call.argument(4, "reduce") == "prod"),
    "layer_norm": replace(
        _NORM, wrong_derivative=lambda call: call.argument(2, "weight") is not None
    ),
    "batch_norm": replace(_NORM, concerns=lambda call: bool(call.argument(5, "training"))),
    "instance_norm": _NORM,
}
KNOWN_BUGS = {name: bug for name, bug in EVERY_BUG.items() if not is_mended(name)}
# The same under other names, and torch's operators beneath them.
_EVERY_ALIAS = {
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_cdist_forward": "cdist",
    "linalg_det": "det",
    "_linalg_det": "det",
    "linalg_slogdet": "slogdet",
    "_linalg_slogdet": "slogdet",
    "scatter_reduce_": "scatter_reduce",
    "index_fill_": "index_fill",
}
ALIASES = {alias: name for alias, name in _EVERY_ALIAS.items() if name in KNOWN_BUGS}
