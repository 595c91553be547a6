"""Operations that drop the graph of a result that varies: formulas, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from gradkit._compat.transforms import forward_mode_on, layers, without_innermost_tangent
from gradkit.errors import UnsupportedGraphError, message

Reason: TypeAlias = tuple[str, str, str]  # expected, got, what to do

DIFFERENTIABLE = "a graph whose derivative can be differentiated"
_EXPECTED = "operations that have a derivative in torch"
_CONSTANT = "if its result is meant as a constant, give it x.detach()"
_BY_FUNCTION = "a torch.autograd.Function whose backward has its derivative"
_OF_SECOND = f"or write {_BY_FUNCTION}"
_ALONE = "differentiate with respect to x alone, in reverse mode: give it"
_OTHER = f"other operations; or {_BY_FUNCTION}"
_FORWARD = re.compile(r"forward AD with (aten::)?(\w+) that does not support it")
_MISSING = re.compile(r"derivative for '?(?:aten::)?([\w: ]+?)'? is not implemented")
# By torch's name: what it is called, and what to write in its place.
_KNOWN: dict[str, tuple[str, str]] = {
    "igamma": ("torch.special.gammainc(a, x) by a", f"{_ALONE} a.detach(); {_OF_SECOND}"),
    "igammac": ("torch.special.gammaincc(a, x) by a", f"{_ALONE} a.detach(); {_OF_SECOND}"),
    "zeta": ("torch.special.zeta(s, x) by s", f"{_ALONE} s.detach(); {_OF_SECOND}"),
    "geqrf": ("torch.geqrf", "torch.linalg.qr(a)"),
    "linalg_ldl_factor_ex": ("torch.linalg.ldl_factor", "torch.linalg.lu_factor(a)"),
    "linalg_ldl_solve": ("torch.linalg.ldl_solve", "torch.linalg.solve(a, b)"),
    "acosh_": ("acosh_", "x.acosh(), not in place"),
    "asinh_": ("asinh_", "x.asinh(), not in place"),
    "atanh_": ("atanh_", "x.atanh(), not in place"),
    "_unique2": ("torch.unique", "torch.sort(x)[0], with every value as often as it stands"),
    "unique_dim": ("torch.unique with dim", _OTHER),
    "unique_consecutive": ("torch.unique_consecutive", _OTHER),
    "embedding_renorm_": ("torch.embedding_renorm_", _OTHER),
    "bincount": ("torch.bincount", "torch.zeros(size).index_add(0, indices, weights)"),
    "_chunk_cat": ("torch._chunk_cat", "torch.cat"),
    "scatter": ("torch.scatter with reduce", "torch.scatter_reduce"),
    "_sample_dirichlet": ("torch._sample_dirichlet", "torch.distributions.Dirichlet(x).rsample()"),
}
# How torch calls some of them in reverse mode.
_IN_PLACE = {f"inplace version of {name}": f"{name}_" for name in ("acosh", "asinh", "atanh")}
_ALIASES = {"special_zeta": "zeta", "embedding_renorm": "embedding_renorm_", **_IN_PLACE}
# By a part of torch's text: what came, and what to do.
_TEXTS: dict[str, tuple[str, str]] = {
    "The QR decomposition is not differentiable": (
        "torch.linalg.qr with mode='complete' of a matrix that has more rows than columns",
        "torch.linalg.qr(a), whose mode is 'reduced'",
    ),
    "The derivative of linalg.qr depends on Q": (
        "torch.linalg.qr with mode='r'",
        "torch.linalg.qr(a)[1], whose mode is 'reduced'",
    ),
    "up to multiplication by e^{i phi}": (
        "complex singular vectors or eigenvectors, of which the loss takes the phase",
        "a loss that does not depend on that phase: of abs() of the vectors, or of u @ u.mH",
    ),
    "scale_grad_by_freq not supported with sparse": (
        "an embedding with sparse=True and scale_grad_by_freq=True",
        "leave out one of these options",
    ),
}


def missing_derivative(error: BaseException) -> Reason | None:
    """Return what was expected, what came and what to do, if torch has raised for want of one."""
    for text, (got, fix) in _TEXTS.items():
        if text in str(error):
            return _EXPECTED, f"{got}, which has none", fix
    forward = _FORWARD.search(str(error))
    if forward is not None:  # one of aten:: has no derivative in either mode
        name = _ALIASES.get(forward[2], forward[2])
        return _without_any(name) if forward[1] or name in _KNOWN else None
    missing = _MISSING.search(str(error))
    if missing is None:
        return None
    name = missing[1].partition(": ")[0]
    if "backward" in name or name.endswith("_grad"):
        return without_second(name, "compute it by other operations")
    return _without_any(_ALIASES.get(name, name))


def _without_any(name: str) -> Reason:
    operation, fix = _KNOWN.get(name, (f"torch.{name}", _OTHER))
    return _EXPECTED, f"{operation}, which has none, of any order", f"{fix}; or, {_CONSTANT}"


def without_second(operation: str, fix: str) -> Reason:
    """Return the reason for an operation whose second derivative torch does not have."""
    got = f"{operation}, whose second derivative torch does not have"
    fix = f"leave out create_graph=True; take unroll(..., first_order=True); or {fix}"
    return DIFFERENTIABLE, got, fix


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
        # Without this, transforms around this one would lose their tangents here.
        (x,) = ctx.saved_tensors
        with forward_mode_on():
            along: Tensor = tangents[-1] * ctx.family.slope(ctx.n, without_innermost_tangent(x))
            return along


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


_FAMILIES = (
    Family("bessel_j", 1, -1),
    Family("bessel_y", 1, -1, is_regular=False),
    Family("modified_bessel_i", 1, 1),
    Family("modified_bessel_k", -1, -1, is_regular=False),
    Family("scaled_modified_bessel_k", -1, -1, is_regular=False, scaled=True),
    Family("spherical_bessel_j", 1, -1, half=0.5),
)
# The kinds of Chebyshev polynomials, by p_{-1}; and other polynomials, by their recurrence.
_CHEBYSHEV: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x,
    "u": torch.zeros_like,
    "v": torch.ones_like,
    "w": lambda x: -torch.ones_like(x),
}
_OTHERS: dict[str, Step] = {
    "hermite_polynomial_h": lambda k, x, now, last: 2 * x * now - 2 * k * last,
    "hermite_polynomial_he": lambda k, x, now, last: x * now - k * last,
    "laguerre_polynomial_l": lambda k, x, now, last: ((2 * k + 1 - x) * now - k * last) / (k + 1),
    "legendre_polynomial_p": lambda k, x, now, last: ((2 * k + 1) * x * now - k * last) / (k + 1),
}
SPECIAL_FUNCTIONS: dict[str, Operation] = {
    f"{family.name}{n}": partial(_bessel, family, n)
    for family in _FAMILIES
    for n in (0, 1)
    if hasattr(torch.special, f"{family.name}{n}")
}
SPECIAL_FUNCTIONS |= {
    f"{shifted}chebyshev_polynomial_{kind}": partial(
        _polynomial, lambda _, x, now, last: 2 * x * now - last, before, is_shifted=bool(shifted)
    )
    for kind, before in _CHEBYSHEV.items()
    for shifted in ("", "shifted_")
} | {name: partial(_polynomial, step, torch.zeros_like) for name, step in _OTHERS.items()}
