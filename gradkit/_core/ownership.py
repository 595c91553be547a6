"""Results are yours: no gradient that is handed out shares memory with anything else.

The engine hands out whatever a backward function made: the seed itself, one tensor for two
parameters, an expanded tensor of one element, a tensor that a hook has kept [A1, A3, A4].
`AccumulateGrad` copies what it cannot take over; this does the same for functional results, and
looks at the storage too, so that what is already ours costs no copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

# Tensors whose memory is what it looks like; a subclass may hold several, or none.
PLAIN_TYPES = {Tensor, torch.nn.Parameter}

_storages = torch.Tensor.untyped_storage
_address = attrgetter("_cdata")
_base = attrgetter("_base")
_uses = torch._C._storage_Use_Count
# Of torch's own owners, too; before it could be asked, Python's references have to do.
_tensor_uses: Callable[[Any], int] = getattr(torch.Tensor, "_use_count", sys.getrefcount)
_is_contiguous = torch.Tensor.is_contiguous
_stride = torch.Tensor.stride
_is_zero_tensor = torch.Tensor._is_zerotensor


def own(grads: list[Tensor], params: Sequence[Tensor], leading: tuple[int, ...] = ()) -> None:
    """Replace every gradient that shares memory, or is laid out otherwise than its parameter.

    Args:
        grads: Gradients without a graph, each referred to by this list and nothing else of ours;
            changed in place.
        params: The parameter of each. Its strides are what the gradient gets where it is dense,
            contiguous ones otherwise, as `AccumulateGrad` does it: in dimensions of size 1, which
            are no steps in memory, any stride will do.
        leading: Sizes in front of those of the parameters: the gradients are stacked.
    """
    if leading and not all(map(_is_contiguous, params)):
        params = [_layout_of_rows(param, leading) for param in params]
        leading = ()
    for index in _not_ours(grads, params):
        like = _layout_of_rows(params[index], leading) if leading else params[index]
        grads[index] = copy_for(grads[index].detach(), like)


def _not_ours(grads: list[Tensor], params: Sequence[Tensor]) -> Sequence[int]:
    # Column by column, at the speed of C: a loop over the leaves would double the cost of a call.
    try:
        laid_out = (
            all(map(_is_contiguous, grads))
            and all(map(_is_contiguous, params))
            and 0 not in chain.from_iterable(map(_stride, grads))
            and not any(map(_is_zero_tensor, grads))
        )
        uses = list(map(_uses, map(_address, map(_storages, grads))))
    except (RuntimeError, NotImplementedError, TypeError):
        return range(len(grads))  # sparse, or a wrapper without a storage: always copied
    held = list(map(sys.getrefcount, grads))
    if laid_out and set(held) == {_ALONE} and _only_views_share(grads, uses):
        return ()
    return [
        index
        for index, grad in enumerate(grads)
        if held[index] != _ALONE
        or not _only_views_share([grad], [uses[index]])
        or not _is_laid_out(grad, params[index])
    ]


def _is_laid_out(grad: Tensor, param: Tensor) -> bool:
    # An expanded tensor, or the zeros that have no memory at all, cannot be changed in place.
    if 0 in grad.stride() or grad._is_zerotensor():
        return False
    if param.is_contiguous() or not _is_dense(param):
        return grad.is_contiguous()
    pairs = zip(param.shape, grad.stride(), param.stride(), strict=True)
    return all(mine == wanted for size, mine, wanted in pairs if size != 1)


def _is_dense(param: Tensor) -> bool:
    # empty_like keeps the strides of a tensor exactly when it is dense and does not overlap.
    return torch.empty_like(param, device="meta").stride() == param.stride()


def _only_views_share(grads: list[Tensor], uses: list[int]) -> bool:
    """Return whether each storage is one tensor's, or a view's whose base nothing else holds."""
    if set(uses) == {_STORAGE_ALONE}:
        return True
    if not set(uses) <= {_STORAGE_ALONE, _VIEW_ALONE}:
        return False
    views = [grad for grad, count in zip(grads, uses, strict=True) if count == _VIEW_ALONE]
    bases = list(map(_base, views))
    if type(None) in set(map(type, bases)):
        return False  # no view, but what detach() makes shares memory, too
    return set(map(_tensor_uses, bases)) == {_BASE_ALONE}


def copy_for(grad: Tensor, param: Tensor) -> Tensor:
    """Return a copy of a gradient, laid out as accumulation puts it into an empty `.grad`.

    Args:
        grad: The gradient; if it has a graph, the copy has it, too.
        param: Its parameter.

    Returns:
        A gradient that shares memory with nothing.
    """
    plain = grad.layout == torch.strided and type(grad) is Tensor and not grad.requires_grad
    if not plain or _is_laid_out(grad, param):
        return grad.clone()
    return empty_for(param, grad.dtype, device=grad.device).copy_(grad)


def empty_for(
    param: Tensor,
    dtype: torch.dtype,
    leading: tuple[int, ...] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Return uninitialized memory for a gradient: of shape `leading + param.shape`.

    Args:
        param: The parameter whose device, and whose strides if it is dense, the gradient gets.
        dtype: The dtype of the gradient.
        leading: Sizes to put in front, laid out so that each element is one gradient.
        device: Where to put it; None is where the parameter is.

    Returns:
        A dense tensor.
    """
    device = device or param.device
    if param.layout != torch.strided:
        return torch.empty(*leading, *param.shape, dtype=dtype, device=device)
    inner = param.stride()
    if not _is_dense(param):
        inner = torch.empty(param.shape, device="meta").stride()
    strides: list[int] = []
    step = param.numel()
    for size in reversed(leading):
        strides.insert(0, step)
        step *= size
    return torch.empty_strided(
        (*leading, *param.shape), (*strides, *inner), dtype=dtype, device=device
    )


def _layout_of_rows(param: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Return a tensor without memory, laid out like stacked gradients of `param`."""
    return empty_for(param, param.dtype, leading, torch.device("meta"))


def zeros_for(param: Tensor, leading: tuple[int, ...] = ()) -> Tensor:
    """Return a dense zero gradient for `param`, in the dtype that its gradient would have."""
    if type(param) not in PLAIN_TYPES:
        zero = torch.zeros_like(param.detach(), dtype=grad_dtype(param))
        count = torch.Size(leading).numel()
        return torch.stack([zero] * count).reshape(*leading, *param.shape) if leading else zero
    return empty_for(param, grad_dtype(param), leading).zero_()


def grad_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a gradient of `param`: `param.grad_dtype`, or `param.dtype`."""
    return (param.grad_dtype if param.grad_fn is None else None) or param.dtype


# What the reads above give for a tensor that nothing else refers to, taken through the same steps.
_lone, _view = [torch.empty(2)], [torch.empty(2)[:1]]
_ALONE = next(map(sys.getrefcount, _lone))
_STORAGE_ALONE = next(map(_uses, map(_address, map(_storages, _lone))))
_VIEW_ALONE = next(map(_uses, map(_address, map(_storages, _view))))
_BASE_ALONE = next(map(_tensor_uses, map(_base, _view)))
del _lone, _view
