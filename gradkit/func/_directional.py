"""Derivatives of a function of tensors along random directions: by torch, and by differences.

A sequence of modes names a derivative: ("reverse", "forward") is the forward-mode derivative of the
function's reverse-mode derivative. Each mode has random tangents and cotangents of its own. Those
of the last are constants; those of the others vary with the values, so that a backward pass that
takes its cotangent for a constant shows. (Where torch cannot run that, they are constants, too.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.func import jvp, vjp

from gradkit._autograd.engine import inner_grads
from gradkit._checks.differentiated_jvps import DifferentiatedJvps
from gradkit._compat.transforms import is_dual
from gradkit._compat.undoing import INSIDE

forward_ad: Any = _forward_ad  # whose functions have no types
Tensors: TypeAlias = Sequence[Tensor]
Function: TypeAlias = Callable[[Tensors], Tensors]
Modes: TypeAlias = tuple[str, ...]  # from the innermost mode
REVERSE, FORWARD = "reverse", "forward"


def normal_like(tensors: Tensors, seed: int) -> list[Tensor]:
    """Return the same random tensors in every call with a seed."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, dtype=x.dtype, generator=source).to(x.device) for x in tensors]


def dot(a: Tensors, b: Tensors) -> float:
    """Return the real inner product of two lists of tensors."""
    return sum(float((x.conj() * y).real.sum()) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Directions:
    """The directions of one derivative of several, the innermost of which has number 0."""

    number: int
    tangents: Tensors
    is_constant: bool

    def tangents_at(self, inputs: Tensors) -> list[Tensor]:
        """Return the direction in the inputs."""
        return self._weighted(self.tangents, inputs)

    def cotangents_at(self, outputs: Tensors) -> list[Tensor]:
        """Return the weights of the outputs."""
        return self._weighted(normal_like(outputs, 2 * self.number + 1), outputs)

    def _weighted(self, constants: Tensors, values: Tensors) -> list[Tensor]:
        if self.is_constant:
            return list(constants)
        return [c * (1 + x) for c, x in zip(constants, values, strict=True)]


def _reverse_by_engine(fn: Function, directions: Directions) -> Function:
    def derivative(inputs: Tensors) -> Tensors:
        nested = any(x.requires_grad or is_dual(x) for x in inputs)
        for x in inputs:
            x.requires_grad_()
        outputs = fn(inputs)
        seeds = directions.cotangents_at(outputs)
        reached = inner_grads(outputs, inputs, seeds, create_graph=nested)
        pairs = zip(inputs, reached, strict=True)
        grads = [torch.zeros_like(x) if grad is None else grad for x, grad in pairs]
        return list(map(_dense, grads))

    return derivative


def _forward_by_engine(fn: Function, directions: Directions) -> Function:
    def derivative(inputs: Tensors) -> Tensors:
        with forward_ad.dual_level(), INSIDE:
            outputs = fn(list(map(forward_ad.make_dual, inputs, directions.tangents_at(inputs))))
            pairs = [forward_ad.unpack_dual(x) for x in outputs]
            return [torch.zeros_like(x) if t is None else _dense(t) for x, t in pairs]

    return derivative


def _reverse_by_func(fn: Function, directions: Directions) -> Function:
    def derivative(inputs: Tensors) -> Tensors:
        outputs, pull = vjp(lambda *xs: tuple(fn(xs)), *inputs)  # type: ignore[misc]
        return list(map(_dense, pull(tuple(directions.cotangents_at(outputs)))))

    return derivative


def _forward_by_func(fn: Function, directions: Directions) -> Function:
    def derivative(inputs: Tensors) -> Tensors:
        tangents = tuple(directions.tangents_at(inputs))
        return list(map(_dense, jvp(lambda *xs: tuple(fn(xs)), tuple(inputs), tangents)[1]))

    return derivative


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


# torch.func cannot enter every function, and for some it runs other formulas than the engine.
APIS = {
    "torch.autograd": {REVERSE: _reverse_by_engine, FORWARD: _forward_by_engine},
    "torch.func": {REVERSE: _reverse_by_func, FORWARD: _forward_by_func},
}


_ROUNDING = 16 * torch.finfo(torch.float64).eps  # of what a function computes, roughly


@dataclass(frozen=True)
class Estimate:
    """Two one-sided finite differences, and how much of them may be rounding."""

    ahead: float
    behind: float
    rounding: float

    @property
    def central(self) -> float:
        """The finite difference across the point."""
        return (self.ahead + self.behind) / 2


@dataclass(frozen=True)
class Directional:
    """The directional derivatives of a function at a point."""

    fn: Function  # from float64 or complex128 tensors to such
    point: Tensors  # its inputs
    # The context of each evaluation, after which the state is as before.
    isolated: Callable[[], AbstractContextManager[object]]
    varying: bool = True  # directions below the last derivative vary with the values

    def tangents(self, number: int, leaf: int | None = None) -> list[Tensor]:
        """Return the direction of a derivative; with `leaf`, its part there and zeros elsewhere."""
        every = normal_like(self.point, 2 * number)
        is_part = [leaf is None or index == leaf for index in range(len(every))]
        return [x if part else x * 0 for x, part in zip(every, is_part, strict=True)]

    def evaluate(self, fn: Function, shifts: Tensors | None = None) -> list[Tensor]:
        """Return the values of a function of the inputs, at the point or beside it."""
        inputs = [x.clone() for x in self.point]
        if shifts is not None:
            inputs = [x + shift for x, shift in zip(inputs, shifts, strict=True)]
        with self.isolated(), torch.enable_grad(), DifferentiatedJvps(), INSIDE:
            return [x.detach() for x in fn(inputs)]

    def derivative(self, modes: Modes, api: str) -> Function:
        """Return the derivative in these modes, a function of the inputs."""
        fn = self.fn
        for number, mode in enumerate(modes):
            fn = APIS[api][mode](
                fn, Directions(number, self.tangents(number), is_constant=not self.varying)
            )
        return fn

    def product(self, modes: Modes, api: str, leaf: int | None = None) -> float:
        """Return what torch gives for the last derivative in these modes, along a direction."""
        number = len(modes) - 1
        directions = Directions(number, self.tangents(number, leaf), is_constant=True)
        values = self.evaluate(APIS[api][modes[-1]](self.derivative(modes[:-1], api), directions))
        if modes[-1] == REVERSE:
            return dot(values, directions.tangents)
        return dot(directions.cotangents_at(values), values)

    def differences(self, prefix: Modes, api: str, eps: float, tangents: Tensors) -> Estimate:
        """Return the same by finite differences of the derivative before."""
        fn = self.derivative(prefix, api)
        step = eps / (sqrt(dot(tangents, tangents)) or 1.0)
        here = self.evaluate(fn)
        seeds = Directions(len(prefix), tangents, is_constant=True).cotangents_at(here)
        ahead, behind = (self.evaluate(fn, [sign * step * t for t in tangents]) for sign in (1, -1))
        pairs = (ahead, here), (here, behind)
        changes = [[x - y for x, y in zip(a, b, strict=True)] for a, b in pairs]
        scale = dot([x.abs() for x in seeds], [x.abs() for x in here]) / step
        one, other = (dot(seeds, change) / step for change in changes)
        return Estimate(one, other, _ROUNDING * scale)
