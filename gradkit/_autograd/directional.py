"""Derivatives of a function of tensors along directions, by torch.autograd and by torch.func.

For `check_grads` and `report.compare`, which compare these, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad
from torch.func import jvp, vjp

from gradkit._autograd.engine import inner_grads
from gradkit._compat.transforms import is_dual
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree

forward_ad: Any = _forward_ad  # whose functions have no types
Tensors: TypeAlias = Sequence[Tensor]
Function: TypeAlias = Callable[[Tensors], Tensors]
# torch.func cannot enter every function, and for some it runs other formulas than the engine.
APIS = ("torch.autograd", "torch.func")


def random_like(seed: int, values: Tensors, *, varying: bool = False) -> list[Tensor]:
    """Return the random tensors of a seed; `varying` ones depend on the values, too."""
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(x.shape, dtype=x.dtype, generator=source).to(x.device) for x in values]
    return [r * (1 + x) for r, x in zip(parts, values, strict=True)] if varying else parts


def dot(a: Tensors, b: Tensors) -> float:
    """Return the real inner product of two lists of tensors."""
    return sum(float((x.conj() * y).real.sum()) for x, y in zip(a, b, strict=True))


def differentiate(
    fn: Function, mode: str, api: str, direction: Function, inputs: Tensors
) -> list[Tensor]:
    """Return a derivative of fn along a direction, of its outputs in reverse mode."""
    if mode == "reverse" and api == "torch.autograd":
        nested = any(x.requires_grad or is_dual(x) for x in inputs)
        outputs = fn([x.requires_grad_() for x in inputs])
        grads = inner_grads(outputs, inputs, direction(outputs), create_graph=nested)
        return _without_none(zip(inputs, grads, strict=True))
    if mode == "reverse":
        outputs, pull = vjp(lambda *xs: tuple(fn(xs)), *inputs)  # type: ignore[misc]
        return dense(pull(tuple(direction(outputs))))
    tangents = tuple(direction(inputs))
    if api == "torch.func":
        return dense(jvp(lambda *xs: tuple(fn(xs)), tuple(inputs), tangents)[1])
    with forward_ad.dual_level(), INSIDE:
        outputs = fn(list(map(forward_ad.make_dual, inputs, tangents)))
        return _without_none(map(forward_ad.unpack_dual, outputs))


def _without_none(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    return dense([
        torch.zeros_like(x) if derivative is None else derivative for x, derivative in pairs
    ])


def dense(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, sparse ones as dense ones."""
    return [x if x.layout == torch.strided else x.to_dense() for x in tensors]


def is_number(x: object) -> bool:
    """Return whether this is a floating-point or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def dense_numbers(tree: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors of a tree, dense."""
    return dense(filter(is_number, pytree.tensors(tree)))


def in_double(x: Any) -> Any:
    """Return a float64 or complex128 copy of a tensor or a module; others as they are."""
    if isinstance(x, Tensor):
        dtype = torch.promote_types(x.dtype, torch.float64) if is_number(x) else x.dtype
        return x.detach().to(dtype, copy=True)
    return deepcopy(x).double() if isinstance(x, nn.Module) else x
