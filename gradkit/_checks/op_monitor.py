"""Operations whose derivative torch.func gets silently wrong, found before it is taken.

Each entry of the table is a defect of torch's own formulas or batching rules, with the place where
it shows. The tests of these fail when torch has mended one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import BATCH, DERIVATIVES, transforms
from gradkit.errors import UnsupportedGraphError, message

Stack: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call of an operation, and where it stands.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        functional: It is the function of torch.nn.functional, with an order of its own.
        stack: The transforms around it, from the outermost.
        outer: Those of them around the level that watches.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    functional: bool
    stack: Stack
    outer: Stack

    def argument(self, place: int, name: str) -> Any:
        """Return an argument, None if it was left out."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    def batched(self) -> bool:
        """Return whether it runs in a vmap."""
        return BATCH in self.stack

    def batched_and_differentiated(self) -> bool:
        """Return whether it runs in a vmap that is differentiated."""
        return _inside(self.stack, BATCH)

    def forward(self) -> bool:
        """Return whether a forward-mode derivative is taken of it."""
        return "Jvp" in self.stack

    def forward_and_differentiated(self) -> bool:
        """Return whether a forward-mode derivative is taken, and differentiated."""
        return _inside(self.stack, "Jvp")

    def third(self) -> bool:
        """Return whether a third derivative is taken of it."""
        return sum(kind in DERIVATIVES for kind in self.stack) > 2

    def differentiated_outside(self) -> bool:
        """Return whether someone may take a batched backward pass of what the level returns."""
        return not DERIVATIVES.isdisjoint(self.outer)


def _inside(stack: Stack, kind: str) -> bool:
    """Return whether a transform of this kind stands inside of one that differentiates."""
    last = len(stack) - 1 - stack[::-1].index(kind) if kind in stack else 0
    return not DERIVATIVES.isdisjoint(stack[:last])


Condition: TypeAlias = Callable[[Call], bool]


@dataclass(frozen=True)
class KnownBug:
    """What torch gets wrong about an operation.

    Attributes:
        what: What is wrong, for the error.
        do: What to write in its place.
        now: Where the call is wrong by itself, or will be with what is around it.
        passes: A batched backward pass through it is wrong.
        second: The derivative of a batched backward pass through it is wrong.
        concerns: Which calls of it are concerned.
    """

    what: str
    do: str
    now: Condition
    passes: bool = False
    second: Condition = lambda call: False
    concerns: Condition = lambda call: True


def _is_weighted(call: Call) -> bool:
    return call.argument(3 if call.functional else 1, "weight") is not None


def _is_training(call: Call) -> bool:
    return bool(call.argument(5, "training"))


def _norm_is_wrong(call: Call) -> bool:
    return call.forward_and_differentiated() or call.third()


_WEIGHT = (
    "a derivative of a batched gradient, grad(vmap(grad(f))), or a third derivative, or one of a "
    "jvp, is silently wrong"
)
_RANGE = "take every derivative inside of the vmap, two at most; or use group_norm or rms_norm"
_DETERMINANT = KnownBug(
    "the derivative of its jvp is silently wrong",
    "take the jvp of the gradient: hvp(f, primals, tangents)",
    Call.forward_and_differentiated,
)
_FORWARD = KnownBug(
    "its forward-mode derivative is silently wrong",
    'hvp(..., mode="reverse-over-reverse"), and grad or jacrev in place of jvp or jacfwd',
    Call.forward,
)
KNOWN_BUGS: dict[str, KnownBug] = {
    "cdist": KnownBug(
        "a batched backward pass through it is silently wrong",
        "(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)",
        Call.differentiated_outside,
        passes=True,
    ),
    "as_strided_scatter": KnownBug(
        "its derivative is silently wrong",
        "index_put, or torch.where",
        lambda call: (
            call.batched()
            or call.forward()
            or call.differentiated_outside()
            or call.argument(0, "input").requires_grad
            or call.argument(1, "src").requires_grad
        ),
    ),
    "roll": KnownBug(
        "vmap gets it silently wrong for a tensor without dimensions",
        "leave it out: it moves nothing there",
        Call.batched,
        passes=True,
        concerns=lambda call: call.argument(0, "input").dim() == 0,
    ),
    "masked_select": KnownBug(
        "a batched backward pass through it is silently wrong where it broadcasts",
        "expand the tensor to the shape of the mask first",
        Call.differentiated_outside,
        passes=True,
        concerns=lambda call: call.argument(0, "input").shape != call.argument(1, "mask").shape,
    ),
    "index_fill": KnownBug(
        "vmap gets it silently wrong for a value that is a tensor",
        "torch.where, or index_put",
        Call.batched,
        passes=True,
        concerns=lambda call: isinstance(call.argument(3, "value"), Tensor),
    ),
    "select_scatter": KnownBug(
        "the derivative of what vmap makes of it is silently wrong",
        "torch.where, or index_put; or the gradient inside of the vmap",
        Call.batched_and_differentiated,
    ),
    "det": _DETERMINANT,
    "slogdet": _DETERMINANT,
    "logdet": _DETERMINANT,
    "cholesky_inverse": _FORWARD,
    "triangular_solve": _FORWARD,
    "scatter_reduce": KnownBug(
        _FORWARD.what, _FORWARD.do, _FORWARD.now,
        concerns=lambda call: call.argument(4, "reduce") == "prod",
    ),
    "layer_norm": KnownBug(
        _WEIGHT, _RANGE, _norm_is_wrong,
        second=lambda call: call.argument(2, "weight") is not None,
    ),
    "batch_norm": KnownBug(
        _WEIGHT, _RANGE, _norm_is_wrong, second=_is_weighted, concerns=_is_training
    ),
    "instance_norm": KnownBug(_WEIGHT, _RANGE, _norm_is_wrong, second=_is_weighted),
}  # fmt: skip
# The same under other names, and torch's operators beneath them.
_ALIASES = {
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
_NAMES: dict[Any, str] = {
    getattr(owner, alias): name
    for alias, name in [*((name, name) for name in KNOWN_BUGS), *_ALIASES.items()]
    for owner in (torch, Tensor, torch.linalg, functional)
    if hasattr(owner, alias)
}
_FUNCTIONAL = {functional.batch_norm, functional.instance_norm}
_OPERATORS = (OpOverload, OpOverloadPacket)
_A_PASS = "a backward pass"
_NAMES |= {torch.autograd.grad: _A_PASS, _autograd_grad: _A_PASS}


class OpMonitor(TorchFunctionMode):
    """Sees the operations of a function, and stops what would come out wrong.

    It sees what Python calls, not what torch.jit.script has compiled.

    Args:
        per_sample: The function is for one sample of a batch, so that train-mode batch norm is no
            function of it.
    """

    def __init__(self, *, per_sample: bool = False) -> None:
        super().__init__()
        self._per_sample = per_sample
        self._outer = transforms()
        self._wrong_in_a_pass: list[str] = []
        self._wrong_differentiated: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, unless a trap is known."""
        if func in _NAMES or isinstance(func, _OPERATORS):
            self._meet(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _meet(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        name = _NAMES.get(func) or _name_of_operator(func)
        if name == _A_PASS:
            self.check()
        elif name is not None:
            call = Call(args, kwargs, func in _FUNCTIONAL, transforms(), self._outer)
            self._look(name, call)

    def _look(self, name: str, call: Call) -> None:
        trap = KNOWN_BUGS[name]
        if not trap.concerns(call):
            return
        if name == "batch_norm" and self._per_sample:
            raise UnsupportedGraphError(
                message(
                    "per_sample_grads",
                    "a function of one sample at a time",
                    "batch_norm in train mode, which mixes the samples of a batch: none has a "
                    "gradient of its own",
                    "module.eval(), or a GroupNorm in its place",
                )
            )
        if trap.now(call):
            _refuse(name)
        if trap.passes:
            self._wrong_in_a_pass.append(name)
        if trap.second(call):
            self._wrong_differentiated.append(name)

    def check(self) -> None:
        """Raise if a backward pass through what was seen would come out wrong.

        Raises:
            UnsupportedGraphError: The transforms around it batch what they must not.
        """
        stack = transforms()
        if BATCH in stack and self._wrong_in_a_pass:
            _refuse(self._wrong_in_a_pass[0])
        if _inside(stack, BATCH) and self._wrong_differentiated:
            _refuse(self._wrong_differentiated[0])

    def why_not_batched(self) -> str | None:
        """Return why a vmapped backward pass would not come out right, or None if it does."""
        wrong = list(self._wrong_in_a_pass)
        if not DERIVATIVES.isdisjoint(self._outer):
            wrong += self._wrong_differentiated
        if wrong:
            return f"torch gets it silently wrong for {', '.join(dict.fromkeys(wrong))}"
        if BATCH in self._outer:
            return (
                "in a vmap around the call it would be a batch of batches, for which some rules "
                "of torch are silently wrong"
            )
        return None


def _name_of_operator(func: Any) -> str | None:
    """Return the name of an operator that was called as torch.ops.aten.name."""
    packet = func.overloadpacket if isinstance(func, OpOverload) else func
    name = packet.__name__
    name = _ALIASES.get(name, name)
    return name if name in KNOWN_BUGS else None


def _refuse(name: str) -> NoReturn:
    trap = KNOWN_BUGS[name]
    raise UnsupportedGraphError(
        message(
            f"torch.{name}",
            "an operation whose derivative torch.func gets right here",
            f"{name}: {trap.what}",
            trap.do,
        )
    )
