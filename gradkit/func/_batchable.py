"""Operations in a form that torch.vmap can batch, and that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradkit._compat.autograd import plain_recurrent_kernels
from gradkit._compat.transforms import batched_like, level_of, transforms
from gradkit._compat.undoing import undone
from gradkit._state.copy_on_write import CopyOnWrite, Kwargs, tensors_in
from gradkit._state.rerun import attention_kernels, enable_attention_kernels

_RECURRENT = frozenset(
    getattr(torch, name + of_cell)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for of_cell in ("", "_cell")
)
_ATTENTION = frozenset((
    functional.scaled_dot_product_attention,
    functional.multi_head_attention_forward,
))


class BatchableOps(CopyOnWrite):
    """Runs operations in a form that torch.vmap can batch, and torch.func can differentiate."""

    def __init__(self) -> None:
        level = len(transforms()) + 1  # of the function, whose own tensors are of this, or inside
        super().__init__(lambda tensor: level_of(tensor) < level)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run an operation, if it is one of these without the fused kernels."""
        if func in _RECURRENT:
            with plain_recurrent_kernels():
                return super().run(func, _with_batched_state(self.current(args)), kwargs)
        # The other kernels have no second derivative.
        if func in _ATTENTION and transforms().count("Grad") > 1:
            with _plain_attention():
                return super().run(func, args, kwargs)
        return super().run(func, args, kwargs)


def _with_batched_state(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a recurrent operation; torch writes on the hidden state in place."""
    # (input, state, weights, ...), (data, batch_sizes, state, weights, ...) or the weights in turn.
    index = 2 if isinstance(args[3], list | tuple) else 1
    operands, state = tensors_in(args), args[index]
    if isinstance(state, Tensor):
        state = batched_like(state, operands)
    else:
        state = type(state)(batched_like(part, operands) for part in state)
    return *args[:index], state, *args[index + 1 :]


@contextmanager
def _plain_attention() -> Iterator[None]:
    kernels = attention_kernels()
    with undone(partial(enable_attention_kernels, kernels)):
        enable_attention_kernels([False, False, True, False])
        yield
