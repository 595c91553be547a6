"""What several tests need: bit equality, ownership, and a picture of the world before a call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradkit._compat.versions import is_mended

# torch 2.11 gets second derivatives through DTensors wrong, and gradkit refuses them there.
of_dtensors = pytest.mark.skipif(not is_mended("DTensor"), reason="torch gets them wrong")


def others_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters of a test, of which those that are not quick are for the slow tier."""
    slow = pytest.mark.slow
    return [value if value in quick else pytest.param(value, marks=slow) for value in values]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two gradients are the same bits (a NaN equals itself), or both None."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(a, b), f"leaf {index}: {a} is not {b}"


def assert_owned(grads: Iterable[Tensor | None], params: Iterable[Tensor]) -> None:
    """Law 4: dense, laid out like the parameter, of its grad_dtype, no memory in common."""
    params = list(params)
    seen = {p.untyped_storage().data_ptr() for p in params if p.numel()}
    for grad, param in zip(grads, params, strict=True):
        if grad is None:
            continue
        assert not grad.requires_grad
        assert grad.shape == param.shape
        assert grad.device == param.device
        assert grad.dtype == ((param.grad_dtype if param.is_leaf else None) or param.dtype)
        if grad.layout != torch.strided:
            continue
        dense = torch.empty_like(param, device="meta").stride() == param.stride()
        expected = param.stride() if dense else grad.contiguous().stride()
        for size, got, want in zip(param.shape, grad.stride(), expected, strict=True):
            assert got == want or size == 1
        if grad.numel():
            pointer = grad.untyped_storage().data_ptr()
            assert pointer not in seen, "shares memory with a parameter or another gradient"
            seen.add(pointer)


class World:
    """Everything that a pure call must leave alone."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._before = [self._look(t) for t in tensors]

    @staticmethod
    def _look(t: Tensor) -> tuple[Any, ...]:
        grad = t.grad if t.is_leaf or t.retains_grad else None
        return (
            t.detach().clone(),
            t._version,
            grad,
            None if grad is None else grad.clone(),
            len(t._backward_hooks or ()),
            t.requires_grad,
            t.grad_fn,
        )

    def assert_unchanged(self) -> None:
        for t, before in zip(self._tensors, self._before, strict=True):
            now = self._look(t)
            assert same_bits(now[0], before[0]), "a value changed"
            assert now[1] == before[1], "a version counter moved"
            assert now[2] is before[2], ".grad is another object"
            assert same_bits(now[3], before[3]), ".grad changed"
            assert now[4:] == before[4:], "hooks, requires_grad or history changed"


@contextmanager
def unchanged(*tensors: Tensor) -> Any:
    """Assert that a block, also one that raises, leaves these tensors as they were."""
    world = World(*tensors)
    try:
        yield
    finally:
        world.assert_unchanged()


_writes_on_copies = False


@contextmanager
def writes_on_copies() -> Iterator[None]:
    """Make what writes on gradients here write on copies, as torch asks for: then all are right."""
    global _writes_on_copies
    _writes_on_copies = True
    try:
        yield
    finally:
        _writes_on_copies = False


def written_on(grad: Tensor) -> Tensor:
    """Return the gradient that a hook or Function is given, to write on it in place."""
    return grad.clone() if _writes_on_copies else grad


class Scribble(torch.autograd.Function):
    """The identity, whose backward writes on the cotangent it is given, as it must not [L3]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not grad.numel() or 0 in grad.stride():
            return grad * 7
        return written_on(grad).mul_(7)


class Sevenfold(torch.autograd.Function):
    """The identity, whose backward writes on its cotangent; in the form that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(7)


class Halve(torch.autograd.Function):
    """x / 2, with a saved tensor; returns no gradient for its second argument [C6]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / 2 + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad / 2 + 0 * x, None


class OnceCubed(torch.autograd.Function):
    """Whose second derivative torch drops, without an error, where `inputs` are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x**2
