"""Operations that torch.func gets wrong: which calls of them, on which releases, what to do.

`wrong_derivatives_table` says under which transforms, as a sweep has found; here is what it cannot
say: which calls of an operation are concerned, and what to write in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._checks.differentiable_formulas import FORMULAS
from gradkit._checks.special_functions import SPECIAL_FUNCTIONS
from gradkit._checks.wrong_derivatives_table import OPERATIONS, SWEPT
from gradkit._compat.transforms import BATCH, DERIVATIVES, carries_graph, carries_tangent
from gradkit._compat.versions import is_seen
from gradkit._core import pytree

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


def holds(stack: Stack, part: Stack) -> bool:
    """Return whether a stack holds some transforms, in their order."""
    rest = iter(stack)
    return all(kind in rest for kind in part)


# Of a call, and the transforms of an entry of the table.
Condition: TypeAlias = Callable[[OpCall, Stack], bool]
_PASS = "+Vmap"  # a backward pass alone is batched
_BATCHED, _DERIVATIVE_OF_BATCHED = ("Grad", _PASS), ("Grad", "Grad", _PASS)


@dataclass(frozen=True)
class TransformBug:
    """What torch gets wrong about an operation."""

    fix: str  # what to write in its place
    stacks: tuple[Stack, ...] = ()  # the transforms under which it is wrong, from the outermost
    concerns: Condition = lambda call, stack: True  # which calls of the operation have the bug
    gives: str = "wrong"  # what torch gives

    @property
    def what(self) -> str:
        """What is wrong, in words."""
        words = [_WORDS.get(" ".join(stack), "its derivative") for stack in self.stacks]
        return f"{', or '.join(dict.fromkeys(words))} is silently {self.gives}"

    def wrong_now(self, call: OpCall) -> bool:
        """Return whether the call is wrong, or will be with the transforms around it."""
        # What is around the monitored function may run a batched backward pass through it.
        is_batched = not DERIVATIVES.isdisjoint(call.outer)
        return any(
            self.concerns(call, stack)
            and (holds(call.stack, stack) or (stack == _BATCHED and is_batched))
            for stack in self.stacks
        )

    def wrong_batched(self, call: OpCall) -> bool:
        """Return whether a batched backward pass through the call is wrong."""
        return _BATCHED in self.stacks and self.concerns(call, _BATCHED)

    def wrong_derivative(self, call: OpCall) -> bool:
        """Return whether the derivative of such a pass is wrong."""
        return _DERIVATIVE_OF_BATCHED in self.stacks and self.concerns(call, _DERIVATIVE_OF_BATCHED)


_OF_BATCHED = "a derivative of a batched gradient, grad(vmap(grad(f))),"
_WORDS = {
    "Jvp": "its forward-mode derivative",
    **dict.fromkeys(("Grad Jvp", "Jvp Jvp"), "the derivative of its jvp"),
    "Jvp Grad": "the jvp of its gradient",
    "Grad Grad": "its second derivative",
    **dict.fromkeys(("Grad Grad Grad", "Jvp Grad Grad"), "its third derivative"),
    **dict.fromkeys(("Jvp Jvp Grad", "Jvp Jvp Jvp"), "its third derivative by forward mode"),
    "Vmap": "what vmap makes of it",
    "Grad Vmap": "the derivative of its batching rule",
    "Vmap Vmap": "a batch of batches",
    "Grad +Vmap": "a batched backward pass through it",
    **dict.fromkeys(("Grad Grad +Vmap", "Grad Vmap Grad", "Jvp Vmap Grad"), _OF_BATCHED),
}
_OVER_JVP = "take the jvp of the gradient: hvp(f, primals, tangents)"
_FORWARD = 'hvp(..., mode="reverse-over-reverse"), and grad or jacrev in place of jvp or jacfwd'
_INSIDE = "take every derivative inside of the vmap, two at most; or use group_norm or rms_norm"
_SOLVED = f"{_OVER_JVP}; or torch.linalg.inv(a) @ b"


def _of_norm(call: OpCall, stack: Stack, *, position: int = 1, functional: int = 3) -> bool:
    """Return whether a norm is wrong: batched, it is so only with a weight."""
    weight = call.argument(functional if call.functional else position, "weight")
    return weight is not None or not {BATCH, _PASS} & set(stack)


def _of_own_statistics(call: OpCall, stack: Stack, *, name: str, default: bool) -> bool:
    flag = call.argument(5, name)
    return bool(default if flag is None else flag) and _of_norm(call, stack)


def _is_differentiated(call: OpCall, stack: Stack) -> bool:
    tensors = call.argument(0, "input"), call.argument(1, "src")
    return len(call.stack) > 1 or any(tensor.requires_grad for tensor in tensors)


def _has_values_to_differentiate(call: OpCall, _: Stack) -> bool:
    values = call.argument(1, "values")
    return isinstance(values, Tensor) and (values.requires_grad or "Jvp" in call.stack)


def _reduces_wrongly(call: OpCall, _: Stack) -> bool:
    """Return whether the rule of scatter_reduce, or index_reduce, is wrong for some values."""
    reduce = call.argument(4, "reduce")
    is_extreme = reduce in {"amax", "amin"}
    return reduce == "prod" or (is_extreme and call.kwargs.get("include_self") is False)


def _may_vary(call: OpCall, _: Stack) -> bool:
    """Return whether an operation is given what has a graph, or a tangent."""
    if torch.compiler.is_compiling():  # which cannot tell
        return True
    tensors = pytree.tensors((call.args, call.kwargs)) if torch.is_grad_enabled() else []
    return any(carries_graph(x) or carries_tangent(x) for x in tensors)


# Of these torch gives a result without a graph, or with a gradient of zero.
DROPPED_BY_FORMULA = (*SPECIAL_FUNCTIONS, "linspace", "logspace")
DROPPED = (*DROPPED_BY_FORMULA, "airy_ai", "normal")
_dropped = partial(TransformBug, concerns=_may_vary, gives="zero")
_BY_HAND: dict[str, TransformBug] = {
    "airy_ai": _dropped(
        "if the result is meant as a constant, give it x.detach(); or a torch.autograd.Function "
        "whose backward multiplies by Ai'(x)"
    ),
    "normal": _dropped(
        "mean + std * torch.randn_like(mean); or, if the sample is meant as a constant, give it "
        "mean.detach() and std.detach()"
    ),
    "cdist": TransformBug("(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)"),
    "as_strided_scatter": TransformBug("index_put, or torch.where", concerns=_is_differentiated),
    "roll": TransformBug(
        "leave it out: it moves nothing in a tensor without dimensions",
        concerns=lambda call, _: call.argument(0, "input").dim() == 0,
    ),
    "masked_select": TransformBug(
        "expand the tensor to the shape of the mask first",
        concerns=lambda call, _: call.argument(0, "input").shape != call.argument(1, "mask").shape,
    ),
    "index_fill": TransformBug(
        "torch.where, or index_put",
        concerns=lambda call, _: isinstance(call.argument(3, "value"), Tensor),
    ),
    "select_scatter": TransformBug(
        "torch.where, or index_put; or take the gradient inside the vmap"
    ),
    "sparse_coo_tensor": TransformBug(
        "make it dense: torch.zeros(size).index_put(tuple(indices), values, accumulate=True)",
        concerns=_has_values_to_differentiate,
    ),
    "lu_solve": TransformBug("torch.linalg.solve(a, b)"),
    # This and scatter_reduce, where only the graph tells of a call. Others run by formulas.
    "det": TransformBug(f"{_OVER_JVP}; a third derivative by gradkit.value_and_grads, eagerly"),
    # https://github.com/pytorch/pytorch/issues/192540 and 196698
    **dict.fromkeys(("slogdet", "logdet", "householder_product"), TransformBug(_OVER_JVP)),
    **dict.fromkeys(("solve", "solve_ex", "tensorsolve"), TransformBug(_SOLVED)),
    # https://github.com/pytorch/pytorch/issues/196682
    **dict.fromkeys(
        ("cholesky_inverse", "triangular_solve", "eig", "eigvals"), TransformBug(_FORWARD)
    ),
    "scatter_reduce": TransformBug(
        _FORWARD, concerns=lambda call, _: call.argument(4, "reduce") == "prod"
    ),
    # https://github.com/pytorch/pytorch/issues/196700 and 175754; 196699 and 186256
    "layer_norm": TransformBug(_INSIDE, concerns=partial(_of_norm, position=2, functional=2)),
    "batch_norm": TransformBug(
        _INSIDE, concerns=partial(_of_own_statistics, name="training", default=False)
    ),
    "instance_norm": TransformBug(
        _INSIDE, concerns=partial(_of_own_statistics, name="use_input_stats", default=True)
    ),
}


# What the sweep's table does not have, for it tries operations that have derivatives, at generic
# points: the transforms under which these are wrong elsewhere.
FIRST: tuple[Stack, ...] = (("Grad",), ("Jvp",))
NOT_SWEPT: dict[str, tuple[Stack, ...]] = dict.fromkeys(DROPPED, FIRST)
# Those where a formula is right and torch is wrong, or may be: at singular matrices and equal
# singular values, at ties, at zeros, at entries far apart.
AT_SOME_VALUES: dict[str, tuple[Stack, ...]] = {
    **dict.fromkeys(("det", "sinc", "scatter_reduce", "index_reduce"), FIRST),
    **dict.fromkeys(("logcumsumexp", "weight_norm", "gaussian_nll_loss"), (("Jvp",),)),
    **dict.fromkeys(("polar", "binary_cross_entropy", "cosine_similarity"), FIRST),
    **dict.fromkeys(("softshrink", "hardshrink", "pow", "float_power", "vander"), FIRST),
    "block_diag": (("Grad",),),
}


def stacks_of(name: str) -> tuple[Stack, ...]:
    rows = OPERATIONS.get(name, {}).items()
    swept = (tuple(stack.split()) for stack, seen in rows if is_seen(seen, SWEPT))
    return tuple(dict.fromkeys((*NOT_SWEPT.get(name, ()), *swept)))


EVERY_TRANSFORM_BUG = {name: replace(bug, stacks=stacks_of(name)) for name, bug in _BY_HAND.items()}
TRANSFORM_BUGS = {name: bug for name, bug in EVERY_TRANSFORM_BUG.items() if bug.stacks}
# Operations that run by a formula where torch's own rules are wrong.
_CONCERNS: dict[str, Condition] = {
    **dict.fromkeys((*DROPPED_BY_FORMULA, "det", "sinc", "prod", "cumprod"), _may_vary),
    "scatter_reduce": _reduces_wrongly,
    # Of forward mode it has none.
    "index_reduce": lambda call, stack: stack == ("Jvp",) or _reduces_wrongly(call, stack),
}
BY_FORMULA = {
    name: TransformBug("", stacks, _CONCERNS.get(name, TransformBug.concerns))
    for name in FORMULAS
    if (stacks := (*stacks_of(name), *AT_SOME_VALUES.get(name, ())))
}
# Those of them that write on their first argument.
IN_PLACE = {
    f"{name}_": name
    for name in ("scatter_reduce", "index_reduce", "sinc", "cumprod", "pow", "float_power")
}
# The same under other names, and torch's operators beneath them.
_EVERY_ALIAS = {
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_cdist_forward": "cdist",
    **IN_PLACE,
    "index_fill_": "index_fill",
    "_weight_norm_interface": "weight_norm",
    "orgqr": "householder_product",
}
_WRITTEN = (*TRANSFORM_BUGS, *BY_FORMULA)
_EVERY_ALIAS |= {
    prefix + name: name for name in _WRITTEN for prefix in ("_", "linalg_", "_linalg_", "special_")
}
ALIASES = {name: name for name in _WRITTEN}
ALIASES |= {alias: name for alias, name in _EVERY_ALIAS.items() if name in _WRITTEN}
