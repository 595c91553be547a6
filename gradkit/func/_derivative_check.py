"""Where torch's derivatives of a function, in any mode, are not what finite differences give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf, isfinite, nan

import torch

from gradkit.errors import UnsupportedGraphError, message
from gradkit.func._directional import APIS, REVERSE, Directional, Estimate, Modes, Tensors

# A derivative that is wrong is so at every step; a kink nearby or rounding is not.
_STEPS = (1.0, 1 / 30, 30.0)
_KINK = 1e-2  # how much two finite differences may differ where there is none


@dataclass(frozen=True)
class Tolerance:
    """How far apart two numbers may be, and the step of finite differences."""

    atol: float
    rtol: float
    eps: float

    def agree(self, a: float, b: float, rounding: float = 0.0) -> bool:
        """Return whether two finite numbers are close."""
        size = max(abs(a), abs(b))
        return isfinite(size) and abs(a - b) <= self.atol + self.rtol * size + rounding


@dataclass(frozen=True)
class DirectionalDerivative:
    """A derivative along a direction, as torch gives it."""

    modes: Modes
    api: str
    value: float
    varying: bool  # with directions below the last derivative that vary with the values

    @property
    def mode(self) -> str:
        """Its name: forward-over-reverse."""
        return "-over-".join(reversed(self.modes))

    def __str__(self) -> str:
        """Return its name, and what computed it."""
        return f"{self.mode} ({self.api})"


@dataclass(frozen=True)
class Disagreement:
    """A derivative that is wrong."""

    product: DirectionalDerivative  # what torch gives, along the direction in `leaf` if it is one
    leaf: int | None  # the input at which it is wrong; None if no single one is
    expected: float  # what finite differences give
    agreeing: Sequence[str]  # the modes of the same order in which all is right
    symmetric: bool = False  # the gradient is that of a function of symmetric matrices
    kink: tuple[float, float] | None = None  # two differences, close if fn were smooth here


@dataclass
class DerivativeCheck:
    """Compares a function's derivatives in all modes with finite differences."""

    directional: Directional
    modes: Sequence[str]
    tolerance: Tolerance
    _symmetric: bool = False
    _failures: list[Exception] = field(default_factory=list)
    _estimates: dict[tuple[Modes, float, int | None, bool, bool], Estimate] = field(
        default_factory=dict
    )

    def first_disagreement(self, order: int) -> Disagreement | None:
        """Return the first derivative, up to an order, that is wrong."""
        for degree in range(1, order + 1):
            products = self._that_run(degree)
            wrong = self._wrong(products)
            if degree == 1 and wrong:
                wrong = self._wrong_if_symmetric(products, wrong)
            if wrong:
                in_doubt = {p.mode for p in wrong}
                agreeing = [p.mode for p in products if p.mode not in in_doubt]
                return self._disagreement(wrong[0], list(dict.fromkeys(agreeing)))
        return None

    def _that_run(self, degree: int) -> list[DirectionalDerivative]:
        """Return the derivatives of an order that torch can run; raise if there are none."""
        self._failures.clear()
        products = list(self._products(degree))
        # Forward mode may be without a formula; what has no gradient is not tried at all.
        runs = {p.modes for p in products}
        if not runs or (degree == 1 and REVERSE in self.modes and (REVERSE,) not in runs):
            raise self._nothing_runs(degree)
        return products

    def _products(self, degree: int) -> Iterator[DirectionalDerivative]:
        for modes, api in product(product(self.modes, repeat=degree), APIS):
            for varying in (True, False):
                directional = replace(self.directional, varying=varying)
                try:
                    value = directional.product(modes, api)
                except Exception as error:  # the function itself runs: torch cannot run the mode
                    self._failures.append(error)
                    continue
                yield DirectionalDerivative(modes, api, value, varying)
                break

    def _wrong(self, products: Sequence[DirectionalDerivative]) -> list[DirectionalDerivative]:
        return [p for p in products if not self._agrees(p)]

    def _agrees(self, p: DirectionalDerivative, leaf: int | None = None) -> bool:
        estimates = (self._estimate(p, step, leaf) for step in _STEPS)
        return any(self.tolerance.agree(p.value, e.central, e.rounding) for e in estimates)

    def _estimate(self, p: DirectionalDerivative, step: float, leaf: int | None) -> Estimate:
        """Return what finite differences give; either API serves, as lower orders agree in all."""
        key = p.modes[:-1], step, leaf, self._symmetric, p.varying
        if key not in self._estimates:
            tangents = self._projected(self.directional.tangents(len(p.modes) - 1, leaf))
            eps = self.tolerance.eps * step
            try:
                directional = replace(self.directional, varying=p.varying)
                estimate = directional.differences(key[0], p.api, eps, tangents)
            except Exception:  # a function of symmetric matrices alone raises beside the point
                if self._symmetric or not any(self._is_symmetric):
                    raise
                estimate = Estimate(nan, nan, nan)
            self._estimates[key] = estimate
        return self._estimates[key]

    def _projected(self, tangents: Tensors) -> Tensors:
        if not self._symmetric:
            return tangents
        pairs = zip(tangents, self._is_symmetric, strict=True)
        return [(t + t.mH) / 2 if symmetric else t for t, symmetric in pairs]

    @cached_property
    def _is_symmetric(self) -> list[bool]:
        return [
            x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.allclose(x, x.mH, rtol=1e-6)
            for x in self.directional.point
        ]

    def _wrong_if_symmetric(
        self, products: Sequence[DirectionalDerivative], wrong: list[DirectionalDerivative]
    ) -> list[DirectionalDerivative]:
        """Return what is wrong if the gradient is that of a function of symmetric matrices."""
        # Such is the gradient of torch.linalg.cholesky and its kin, which read one triangle.
        if not any(self._is_symmetric):
            return wrong
        self._symmetric = True
        still = self._wrong(products)
        if len(still) == len(products) or any(p.modes == (REVERSE,) for p in still):
            self._symmetric = False
            return wrong
        return still

    def _disagreement(self, p: DirectionalDerivative, agreeing: Sequence[str]) -> Disagreement:
        leaf, in_leaf = self._worst_leaf(p)
        expected, wider = (self._estimate(in_leaf, step, leaf).central for step in (1.0, 30.0))
        estimate = self._estimate(in_leaf, 1.0, leaf)
        pairs = ((estimate.ahead, estimate.behind), (expected, wider))
        size = abs(in_leaf.value)
        kink = next((p for p in pairs if abs(p[0] - p[1]) > _KINK * max(size, *map(abs, p))), None)
        return Disagreement(in_leaf, leaf, expected, agreeing, self._symmetric, kink)

    def _worst_leaf(self, p: DirectionalDerivative) -> tuple[int | None, DirectionalDerivative]:
        """Return the input at which a derivative is farthest off, and what torch gives there."""
        worst: tuple[float, int | None, DirectionalDerivative] = (-1.0, None, p)
        for leaf in range(len(self.directional.point)):
            directional = replace(self.directional, varying=p.varying)
            here = replace(p, value=directional.product(p.modes, p.api, leaf))
            if not self._agrees(here, leaf):
                gap = abs(here.value - self._estimate(here, 1.0, leaf).central)
                gap = gap if isfinite(gap) else inf
                worst = max(worst, (gap, leaf, here), key=lambda each: each[0])
        return worst[1:]

    def _nothing_runs(self, degree: int) -> UnsupportedGraphError:
        cause, modes = self._failures[0], " or ".join(self.modes)
        expected = f"a function with a derivative of order {degree} in {modes} mode"
        line = str(cause).partition("\n")[0].rstrip(".")
        got = f"torch's error, {type(cause).__name__}: {line}"
        fix = f"order={degree - 1}, or other modes; around attention: sdpa_kernel(SDPBackend.MATH)"
        if degree == 1:
            fix = "let fn leave its arguments as they are, and compute by differentiable operations"
        error = UnsupportedGraphError(message("fn", expected, got, fix))
        error.__cause__ = cause
        return error
