"""Functions of torch.special whose graph torch drops: Bessel functions, orthogonal polynomials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradkit._compat.transforms import forward_mode_on, layers, without_tangent
from gradkit.errors import UnsupportedGraphError, message

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """Bessel functions f_n of one kind.

    With m = n + half, 2 f_n' = below (n / m) f_{n-1} + above ((n + 2 half) / m) f_{n+1}, and
    (2 m / x) f_n = below f_{n-1} - above f_{n+1}: DLMF 10.6.1, 10.29.1 and 10.51, which are 9.1.27,
    9.6.26 and 10.1.19 of Abramowitz and Stegun. So derivatives of any order are sums of them.
    """

    zero: Callable[[Tensor], Tensor]
    one: Callable[[Tensor], Tensor]
    below: int
    above: int
    is_regular: bool = True  # at zero, where its power series is
    half: float = 0.0  # 1 / 2 for spherical ones
    scaled: bool = False  # by exp(x)

    def slope(self, n: int, x: Tensor) -> Tensor:
        """Return the derivative of f_n, differentiable itself."""
        f: Callable[[int, Tensor], Tensor] = partial(_Bessel.apply, self)
        m = n + self.half
        if n == 0:
            slope = self.above * f(1, x)
        else:
            up = (n + 2 * self.half) / m
            slope = (self.below * n / m * f(n - 1, x) + self.above * up * f(n + 1, x)) / 2
        return slope + f(n, x) if self.scaled else slope

    def value(self, n: int, x: Tensor) -> Tensor:
        """Return f_n."""
        if n == 0:
            return self.zero(x)
        before, now = self.zero(x), self.one(x)
        for k in range(1, n):
            both = self.below * before - 2 * (k + self.half) / x * now
            before, now = now, self.above * both
        if not self.is_regular or (n == 1 and not self.half):
            return now
        # The recurrence loses digits where x is small beside n, or where they grow.
        limit = 20 if self.above > 0 else 2 * (n + 1) ** 0.5
        return torch.where(x.abs() < limit, self._series(n, x), now)

    def _series(self, n: int, x: Tensor) -> Tensor:
        # DLMF 10.2.2, 10.25.2 and 10.53.1.
        term = torch.ones_like(x)
        for k in range(1, n + 1):
            term = term * x / (2 * (k + self.half))
        total = term
        for k in range(1, 50):
            term = term * (self.above * x * x / 4) / (k * (n + self.half + k))
            total = total + term
        return total


class _Bessel(Function):
    """f_n(x) of a family."""

    generate_vmap_rule = True

    @staticmethod
    def forward(family: Family, n: int, x: Tensor) -> Tensor:
        return family.value(n, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Family, int, Tensor], output: Tensor) -> None:
        ctx.family, ctx.n, x = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, None, cotangent * ctx.family.slope(ctx.n, x)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        # Torch switches forward mode off here, and so the tangents of transforms around this one.
        (x,) = ctx.saved_tensors
        with forward_mode_on():
            along: Tensor = tangents[-1]
            slope: Tensor = ctx.family.slope(ctx.n, without_tangent(x))
            return along * slope


def _bessel(family: Family, n: int, operation: Operation, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        _refuse(operation, "in a compiled function", "call it outside of what is compiled")
    _refuse_out(operation, kwargs)
    (x,) = (*args, *kwargs.values())
    return _Bessel.apply(family, n, x)  # type: ignore[no-untyped-call]


# f(k, x, p_k, p_{k-1}) is the polynomial after these.
Step = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def _polynomial(
    step: Step,
    before: Callable[[Tensor], Tensor],
    operation: Operation,
    *args: Any,
    is_shifted: bool = False,
    **kwargs: Any,
) -> Any:
    """Return p_n(x), by the recurrence from p_{-1} and p_0 = 1: DLMF 18.9.1."""
    _refuse_out(operation, kwargs)
    x, n = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate("xn"))
    exact = operation(x.detach(), n)
    x = (2 * x - 1 if is_shifted else x).to(exact.dtype)
    last, now = before(x), x**0
    for k in range(_highest(n)):
        after = step(k, x, now, last)
        if isinstance(n, Tensor):  # the polynomial of each element stops at its own order
            goes_on = n >= k + 1
            last, after = torch.where(goes_on, now, last), torch.where(goes_on, after, now)
        else:
            last = now
        now = after
    return exact + (now - now.detach())


def _highest(n: Any) -> int:
    if not isinstance(n, Tensor):
        return int(n)
    *_, orders = layers(n)
    return int(orders.max()) if orders.numel() else 0


def _refuse_out(operation: Operation, kwargs: dict[str, Any]) -> None:
    if kwargs.pop("out", None) is not None:
        _refuse(operation, "with out=", "leave out out=")


def _refuse(operation: Operation, where: str, fix: str) -> None:
    expected = "an operation that is differentiated by gradkit's formula"
    got = f"{operation.__name__} {where}: torch drops its derivative"
    raise UnsupportedGraphError(message("torch.special", expected, got, fix))


def _twice(_: int, x: Tensor, now: Tensor, last: Tensor) -> Tensor:
    return 2 * x * now - last


def _hermite_h(k: int, x: Tensor, now: Tensor, last: Tensor) -> Tensor:
    return 2 * x * now - 2 * k * last


def _hermite_he(k: int, x: Tensor, now: Tensor, last: Tensor) -> Tensor:
    return x * now - k * last


def _laguerre(k: int, x: Tensor, now: Tensor, last: Tensor) -> Tensor:
    return ((2 * k + 1 - x) * now - k * last) / (k + 1)


def _legendre(k: int, x: Tensor, now: Tensor, last: Tensor) -> Tensor:
    return ((2 * k + 1) * x * now - k * last) / (k + 1)


_special = torch.special
_FAMILIES = {
    "bessel_j": Family(_special.bessel_j0, _special.bessel_j1, 1, -1),
    "bessel_y": Family(_special.bessel_y0, _special.bessel_y1, 1, -1, is_regular=False),
    "modified_bessel_i": Family(_special.modified_bessel_i0, _special.modified_bessel_i1, 1, 1),
    "modified_bessel_k": Family(
        _special.modified_bessel_k0, _special.modified_bessel_k1, -1, -1, is_regular=False
    ),
    "scaled_modified_bessel_k": Family(
        _special.scaled_modified_bessel_k0,
        _special.scaled_modified_bessel_k1,
        -1,
        -1,
        is_regular=False,
        scaled=True,
    ),
    "spherical_bessel_j": Family(
        _special.spherical_bessel_j0,
        lambda x: (_special.spherical_bessel_j0(x) - x.cos()) / x,
        1,
        -1,
        half=0.5,
    ),
}
# The kinds of Chebyshev polynomials, by p_{-1}.
_CHEBYSHEV: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x,
    "u": torch.zeros_like,
    "v": torch.ones_like,
    "w": lambda x: -torch.ones_like(x),
}
_OTHERS = {
    "hermite_polynomial_h": _hermite_h,
    "hermite_polynomial_he": _hermite_he,
    "laguerre_polynomial_l": _laguerre,
    "legendre_polynomial_p": _legendre,
}
SPECIAL_FUNCTIONS: dict[str, Operation] = {
    f"{name}{n}": partial(_bessel, family, n)
    for name, family in _FAMILIES.items()
    for n in (0, 1)
    if hasattr(_special, f"{name}{n}")
}
SPECIAL_FUNCTIONS |= {
    f"{shifted}chebyshev_polynomial_{kind}": partial(
        _polynomial, _twice, before, is_shifted=bool(shifted)
    )
    for kind, before in _CHEBYSHEV.items()
    for shifted in ("", "shifted_")
} | {name: partial(_polynomial, step, torch.zeros_like) for name, step in _OTHERS.items()}
