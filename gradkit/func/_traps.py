"""Operations whose derivative torch.func.vmap gets silently wrong, found before it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.eager_transforms import _autograd_grad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradkit._stack import BATCH, DERIVATIVES, transforms
from gradkit.errors import UnsupportedGraphError, message


@dataclass(frozen=True)
class _Norm:
    """Where the weight of a normalization, and its train mode, stand among its arguments."""

    name: str
    weight: int
    training: int | None = None


# A backward pass in a batch is wrong for these [G1].
_BATCHED = {
    torch.cdist: "cdist",
    torch.as_strided_scatter: "as_strided_scatter",
    Tensor.as_strided_scatter: "as_strided_scatter",
    torch.roll: "roll",
    Tensor.roll: "roll",
}
_INSTEAD = {
    "cdist": "(a[..., :, None, :] - b[..., None, :, :]).norm(dim=-1)",
    "as_strided_scatter": "index_put, or torch.where",
    "roll": "leave it out: it moves nothing in a tensor without dimensions",
}
# So is the derivative of a batched backward pass through these, where they have a weight [V1].
_NORMS = {
    functional.layer_norm: _Norm("layer_norm", 2),
    torch.layer_norm: _Norm("layer_norm", 2),
    torch.native_layer_norm: _Norm("layer_norm", 2),
    functional.batch_norm: _Norm("batch_norm", 3, 5),
    torch.batch_norm: _Norm("batch_norm", 1, 5),
    torch.native_batch_norm: _Norm("batch_norm", 1, 5),
    functional.instance_norm: _Norm("instance_norm", 3),
    torch.instance_norm: _Norm("instance_norm", 1),
}
_BACKWARD = (torch.autograd.grad, _autograd_grad)


class Watch(TorchFunctionMode):
    """Sees the operations of a function, and stops a backward pass that would come out wrong.

    Args:
        per_sample: The function is for one sample of a batch, so that train-mode batch norm is no
            function of it.
    """

    def __init__(self, *, per_sample: bool = False) -> None:
        super().__init__()
        self._per_sample = per_sample
        self.wrong_in_a_batch: list[str] = []
        self.wrong_differentiated: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, unless a trap is known."""
        kwargs = kwargs or {}
        if func in _BATCHED:
            self._note_batched(_BATCHED[func], args, kwargs)
        elif func in _NORMS:
            self._note_norm(_NORMS[func], args, kwargs)
        elif func in _BACKWARD:
            self.check()
        return func(*args, **kwargs)

    def _note_batched(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "roll" and _argument(args, kwargs, 0, "input").dim() > 0:
            return
        self.wrong_in_a_batch.append(name)
        if name != "cdist" and BATCH in transforms():
            _refuse_batched(name)  # its value is wrong already, or it raises

    def _note_norm(self, norm: _Norm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if norm.training is not None:
            if not _argument(args, kwargs, norm.training, "training"):
                return
            if self._per_sample:
                _refuse_train_mode()
        if _argument(args, kwargs, norm.weight, "weight") is not None:
            self.wrong_differentiated.append(norm.name)

    def check(self) -> None:
        """Raise if a backward pass through what was seen would come out wrong.

        Raises:
            UnsupportedGraphError: The transforms around it batch what they must not.
        """
        stack = transforms()
        if BATCH not in stack:
            return
        if self.wrong_in_a_batch:
            _refuse_batched(self.wrong_in_a_batch[0])
        innermost_batch = len(stack) - 1 - stack[::-1].index(BATCH)
        if self.wrong_differentiated and not DERIVATIVES.isdisjoint(stack[:innermost_batch]):
            raise UnsupportedGraphError(
                message(
                    self.wrong_differentiated[0],
                    "derivatives inside of vmap: vmap(grad(grad(f)))",
                    "a derivative of a batched gradient, grad(vmap(grad(f))), which torch gets "
                    "silently wrong for a normalization with a weight",
                    "take every derivative inside of the vmap; or use group_norm or rms_norm",
                )
            )

    def named(self) -> str:
        """Return the names of what was seen, for a warning."""
        return ", ".join(dict.fromkeys(self.wrong_in_a_batch + self.wrong_differentiated))

    def may_batch_backward(self) -> bool:
        """Return whether a vmapped backward pass through what was seen comes out right."""
        if self.wrong_in_a_batch:
            return False
        # The innermost level is the one that the pass belongs to.
        return not self.wrong_differentiated or DERIVATIVES.isdisjoint(transforms()[:-1])


def _refuse_train_mode() -> NoReturn:
    raise UnsupportedGraphError(
        message(
            "per_sample_grads",
            "a function of one sample at a time",
            "batch_norm in train mode, which mixes the samples of a batch: none has a gradient of "
            "its own",
            "module.eval(), or a GroupNorm in its place",
        )
    )


def _refuse_batched(name: str) -> NoReturn:
    raise UnsupportedGraphError(
        message(
            f"torch.{name}",
            "an operation that torch.func.vmap batches rightly",
            f"{name}{' of a tensor without dimensions' if name == 'roll' else ''}, whose batched "
            "gradient torch gets silently wrong",
            _INSTEAD[name],
        )
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
