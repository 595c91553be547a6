"""Operations that have no derivative in torch, which raises only once a pass comes to them."""

from __future__ import annotations

import re
from typing import TypeAlias

Reason: TypeAlias = tuple[str, str, str]  # expected, got, what to do

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
    return (
        "a graph whose derivative can be differentiated",
        f"{operation}, whose second derivative torch does not have",
        f"leave out create_graph=True; take unroll(..., first_order=True); or {fix}",
    )
