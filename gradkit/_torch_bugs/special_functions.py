"""Special functions of torch's that drop the graph of a result that varies: their formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradkit._compat.transforms import layers
from gradkit._core.known_results import Result, Rule
from gradkit.errors import UnsupportedGraphError, message

Operation = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """Bessel functions f_n of one kind, of which torch.special has the first, or the first two.

    With m = n + half, 2 f_n' = below (n / m) f_{n-1} + above ((n + 2 half) / m) f_{n+1}, and
    (2 m / x) f_n = below f_{n-1} - above f_{n+1}: DLMF 10.6.1, 10.29.1 and 10.51, which are 9.1.27,
    9.6.26 and 10.1.19 of Abramowitz and Stegun. So derivatives of any order are sums of them.
    """

    name: str  # torch's, without n
    below: int
    above: int
    is_regular: bool = True  # at zero, where its power series is
    half: float = 0.0  # 1 / 2 for spherical ones
    scaled: bool = False  # by exp(x)

    def at(self, n: int, x: Tensor) -> Tensor:
        """Return f_n(x), differentiable."""
        # The rule has tangents of its own: transforms around this one would lose theirs here.
        rule = Rule(
            lambda saved, _, cotangents: [cotangents[0] * self.slope(n, saved[0])],
            lambda saved, tangents: [tangents[0] * self.slope(n, saved[0])],
            lambda x: [self.value(n, x)],
        )
        return Result.of(rule, [x])[0]

    def slope(self, n: int, x: Tensor) -> Tensor:
        """Return the derivative of f_n, differentiable itself."""
        f, m = self.at, n + self.half
        if n == 0:
            slope = self.above * f(1, x)
        else:
            up = (n + 2 * self.half) / m
            slope = (self.below * n / m * f(n - 1, x) + self.above * up * f(n + 1, x)) / 2
        return slope + f(n, x) if self.scaled else slope

    def value(self, n: int, x: Tensor) -> Tensor:
        """Return f_n."""
        before: Tensor = getattr(torch.special, f"{self.name}0")(x)
        if n == 0:
            return before
        one = getattr(torch.special, f"{self.name}1", None)
        now: Tensor = (before - x.cos()) / x if one is None else one(x)
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


def _bessel(family: Family, n: int, operation: Operation, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        _refuse(operation, "in a compiled function", "call it outside of what is compiled")
    _refuse_out(operation, kwargs)
    (x,) = (*args, *kwargs.values())
    return family.at(n, x)


# f(k, x, p_k, p_{k-1}) is the polynomial after these.
Step = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def _polynomial(
    step: Step, before: Operation, operation: Operation, x: Tensor, n: Any, *,
    is_shifted: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return p_n(x), by the recurrence from p_{-1} and p_0 = 1: DLMF 18.9.1."""
    _refuse_out(operation, kwargs)
    exact = operation(x.detach(), n)
    x = (2 * x - 1 if is_shifted else x).to(exact.dtype)
    last, now = before(x), x**0
    for k in range(_highest(n)):
        after = step(k, x, now, last)
        if isinstance(n, Tensor):  # the polynomial of each element stops at its own order
            goes_on = n >= k + 1
            last, now = torch.where(goes_on, now, last), torch.where(goes_on, after, now)
        else:
            last, now = now, after
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


_FAMILIES = (
    Family("bessel_j", 1, -1),
    Family("bessel_y", 1, -1, is_regular=False),
    Family("modified_bessel_i", 1, 1),
    Family("modified_bessel_k", -1, -1, is_regular=False),
    Family("scaled_modified_bessel_k", -1, -1, is_regular=False, scaled=True),
    Family("spherical_bessel_j", 1, -1, half=0.5),
)
SPECIAL_FUNCTIONS: dict[str, Operation] = {
    f"{family.name}{n}": partial(_bessel, family, n)
    for family in _FAMILIES
    for n in (0, 1)
    if hasattr(torch.special, f"{family.name}{n}")
}
# The kinds of Chebyshev polynomials, by p_{-1}; and other polynomials, by their recurrence.
_CHEBYSHEV: dict[str, Operation] = {
    "t": lambda x: x,
    "u": torch.zeros_like,
    "v": torch.ones_like,
    "w": lambda x: -torch.ones_like(x),
}
for _kind, _before in _CHEBYSHEV.items():
    _by = partial(_polynomial, lambda _, x, now, last: 2 * x * now - last, _before)
    SPECIAL_FUNCTIONS[f"chebyshev_polynomial_{_kind}"] = _by
    SPECIAL_FUNCTIONS[f"shifted_chebyshev_polynomial_{_kind}"] = partial(_by, is_shifted=True)
_OTHERS: dict[str, Step] = {
    "hermite_polynomial_h": lambda k, x, now, last: 2 * x * now - 2 * k * last,
    "hermite_polynomial_he": lambda k, x, now, last: x * now - k * last,
    "laguerre_polynomial_l": lambda k, x, now, last: ((2 * k + 1 - x) * now - k * last) / (k + 1),
    "legendre_polynomial_p": lambda k, x, now, last: ((2 * k + 1) * x * now - k * last) / (k + 1),
}
for _name, _step in _OTHERS.items():
    SPECIAL_FUNCTIONS[_name] = partial(_polynomial, _step, torch.zeros_like)
