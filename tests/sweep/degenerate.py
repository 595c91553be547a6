"""Where formulas take branches: zeros, ties, boundaries, singular matrices, sizes, empty shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import cos, sin

import torch
from torch import Tensor
from torch.nn import functional

from tests.sweep.cases import flat
from tests.sweep.programs import Case, Point

Change = Callable[[Tensor], Tensor]


def _with(x: Tensor, value: float, *places: object) -> Tensor:
    """Return a tensor with one value in some places."""
    changed = x.clone()
    for place in places:
        changed[place] = value
    return changed


def _ties(x: Tensor, dim: int) -> Tensor:
    """Return a tensor whose first two slices are equal."""
    changed = x.clone()
    changed.select(dim, 1).copy_(x.select(dim, 0))
    return changed


def _rounded(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(torch.view_as_real(x).round())
    return x.round()


def _ramp(x: Tensor, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, x.numel(), dtype=x.real.dtype).reshape(x.shape).to(x)


def _spread(x: Tensor, *exponents: float) -> Tensor:
    """Return a tensor whose entries are of very different size, in turn."""
    powers = torch.tensor([10.0**e for e in exponents], dtype=x.real.dtype, device=x.device)
    return x * powers[torch.arange(x.numel(), device=x.device) % len(powers)].reshape(x.shape)


_FIRST, _TWO = (..., slice(0, 1)), (..., slice(0, 2))
VALUES: dict[str, Change] = {
    **{
        f"all {value:g}": partial(lambda value, x: torch.full_like(x, value), value)
        for value in (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0)
    },
    "one zero": lambda x: _with(x.reshape(-1), 0, 0).reshape(x.shape),
    "a zero in each row": lambda x: _with(x, 0, _FIRST),
    "two zeros in each row": lambda x: _with(x, 0, _TWO),
    "two zeros": lambda x: _with(x.reshape(-1), 0, slice(0, 2)).reshape(x.shape),
    "a row of zeros": lambda x: _with(x, 0, 0),
    "only one element not zero": lambda x: x * (torch.arange(x.numel()).reshape(x.shape) == 0),
    "a one in each row": lambda x: _with(x, 1, _FIRST),
    "a minus one in each row": lambda x: _with(x, -1, _FIRST),
    "ties in each row": lambda x: _ties(x, -1),
    "equal rows": lambda x: _ties(x, 0),
    "equal in each row": lambda x: x[..., :1].expand(x.shape).clone(),
    "rounded": _rounded,
    "integers": lambda x: _ramp(x, 0, x.numel() - 1),
    "rising far": lambda x: _ramp(x, 0, 900),
    "falling far": lambda x: _ramp(x, 0, -900),
    "far up": lambda x: x + 300,
    "far down": lambda x: x - 300,
}
_SIZES: dict[str, Change] = {
    "tiny": lambda x: x * 1e-150,
    "1e-20": lambda x: x * 1e-20,
    "1e-9": lambda x: x * 1e-9,
    "1e-6": lambda x: x * 1e-6,
    "1e-20 beside 1": lambda x: _spread(x, 0, -20),
    "1e8": lambda x: x * 1e8,
    "huge": lambda x: x * 1e100,
    "1e-8 beside 1e8": lambda x: _spread(x, -8, 8),
    "1e-150 beside 1e150": lambda x: _spread(x, -150, 0, 150),
}
# Cut to dimensions of one element and of none.
SHAPES: dict[str, Change] = {
    "one row": lambda x: x[:1],
    "one column": lambda x: x[..., :1],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "one element": lambda x: x[(slice(0, 1),) * x.dim()],
}
# Whether the directions change each entry by a part of itself: where some are large, they do.
_LARGE = {"1e8", "huge", "1e-8 beside 1e8", "1e-150 beside 1e150"}
SIZES = {name: [True] if name in _LARGE else [False, True] for name in _SIZES}


def _eye(x: Tensor) -> Tensor:
    return torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device).expand(x.shape).clone()


def _rotation(x: Tensor) -> Tensor:
    turned = _eye(x)
    c, s = cos(0.3), sin(0.3)
    turned[..., :2, :2] = torch.tensor([[c, -s], [s, c]], dtype=x.dtype, device=x.device)
    return turned


def _of_rank(x: Tensor, less: int, *, others: float | None = None) -> Tensor:
    """Return a matrix of lower rank; `others` makes all that is left of its spectrum equal."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    kept = s if others is None else torch.full_like(s, others)
    zeros = torch.arange(s.shape[-1], device=s.device) >= s.shape[-1] - less
    return (u * kept.masked_fill(zeros, 0)[..., None, :]) @ vh


def _exactly_singular(x: Tensor) -> Tensor:
    """Return a matrix of small integers, whose last row is twice the first."""
    changed = (3 * x.real).round().to(x)
    changed[..., -1, :] = 2 * changed[..., 0, :]
    return changed


def _gram(x: Tensor, less: int) -> Tensor:
    u, s, _ = torch.linalg.svd(x)
    zeros = torch.arange(s.shape[-1], device=s.device) >= s.shape[-1] - less
    return (u * s.masked_fill(zeros, 0)[..., None, :]) @ u.mH


def _repeated(x: Tensor) -> Tensor:
    """Return a symmetric matrix of which two eigenvalues are equal."""
    u, s, _ = torch.linalg.svd(x)
    s = s.clone()
    s[..., 1] = s[..., 0]
    return (u * s[..., None, :]) @ u.mH


def _triangular(x: Tensor) -> Tensor:
    return x.triu(1)


_WIDE: dict[str, Change] = {  # of matrices of any shape
    "identity": _eye,
    "rotation": _rotation,
    "orthogonal": lambda x: _of_rank(x, 0, others=2.0),
    "of rank n - 1": lambda x: _of_rank(x, 1),
    "of rank n - 2": lambda x: _of_rank(x, 2),
    "of rank n - 1, otherwise equal": lambda x: _of_rank(x, 1, others=1.0),
    "singular, of integers": _exactly_singular,
    "nilpotent": _triangular,
    "diagonal": lambda x: x * _eye(x),
}
_SQUARE: dict[str, Change] = {
    "permutation": lambda x: _eye(x).roll(1, -1),
    "symmetric, of rank n - 1": lambda x: _gram(x, 1),
    "symmetric, of rank n - 2": lambda x: _gram(x, 2),
    "symmetric, a repeated eigenvalue": _repeated,
    "triangular": lambda x: x.triu(),
}


def changes_of(x: Tensor) -> dict[str, Change]:
    """Return what makes degenerate points of a tensor, by name."""
    changes = VALUES | _SIZES | (SHAPES if x.dim() else {})
    if x.dim() >= 2 and min(x.shape[-2:]) >= 2:
        changes |= _WIDE
        if x.shape[-1] == x.shape[-2]:
            changes |= _SQUARE
    return changes


def points_of(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case at degenerate points: of each tensor, and of all at once."""
    yield "as it is", case
    slots = range(len(case.point))
    # A symmetric matrix is of one shape.
    skipped = SHAPES if case.meant else {}
    names = dict.fromkeys(name for x in case.point for name in changes_of(x) if name not in skipped)
    for name in names:
        for which in [*([slots] if len(slots) > 1 else []), *([slot] for slot in slots)]:
            point = _changed(case.point, name, which)
            if point is not None:
                point = tuple(map(_symmetric, point)) if case.meant else point
                yield f"{name} in {list(which)}", replace(case, point=point)
    for slot in slots[1:]:
        if case.point[slot].shape == case.point[0].shape:
            twice = (*case.point[:slot], case.point[0].clone(), *case.point[slot + 1 :])
            yield f"{slot} equal to 0", replace(case, point=twice)


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2 if x.dim() > 1 and x.shape[-1] == x.shape[-2] else x


def _changed(point: Point, name: str, slots: Iterable[int]) -> Point | None:
    """Return a point with some tensors changed, None if that changes nothing or cannot be."""
    new = list(point)
    try:
        for slot in slots:
            change = changes_of(point[slot]).get(name)
            if change is None:
                return None
            new[slot] = change(point[slot])
    except (RuntimeError, IndexError, ValueError):
        return None  # of too few dimensions or elements
    same = all(torch.equal(a, b) for a, b in zip(new, point, strict=True))
    return None if same or not all(bool(x.isfinite().all()) for x in new) else tuple(new)


def at_limits() -> dict[str, Case]:
    """Return calls whose option is a limit that the point is beyond, or at."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    x, y, target = normal(3, 4), normal(3, 4), torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    near = torch.tensor([1e-14, 3e-13, 1 - 1e-14], dtype=torch.float64)
    calls: dict[str, tuple[Callable[..., Tensor], Point]] = {
        "cosine_similarity: below eps": (
            lambda x, y: functional.cosine_similarity(x, y, eps=0.5), (0.1 * x, y),
        ),
        "cosine_similarity: both below eps": (
            lambda x, y: functional.cosine_similarity(x, y, eps=0.5), (0.1 * x, 0.1 * y),
        ),
        "gaussian_nll_loss: below eps": (
            lambda x, v: functional.gaussian_nll_loss(x, y, v, eps=0.5), (x, 0.1 * y.abs()),
        ),
        "binary_cross_entropy: saturated": (
            lambda p: functional.binary_cross_entropy(p, target, reduction="none"), (near,),
        ),
        "binary_cross_entropy: of a sigmoid": (
            lambda x: functional.binary_cross_entropy(x.sigmoid(), target, reduction="none"),
            (torch.tensor([-30.0, -29, -40], dtype=torch.float64),),
        ),
        "softshrink: of nothing": (lambda x: functional.softshrink(x, 0.0), (x.round(),)),
        "hardshrink: of nothing": (lambda x: functional.hardshrink(x, 0.0), (x.round(),)),
    }  # fmt: skip
    return {
        name: Case(name.partition(":")[0], lambda *x, f=call: flat(f(*x)), point)
        for name, (call, point) in calls.items()
    }
