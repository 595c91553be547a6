"""What torch and gradkit get wrong at degenerate points: `python -m tests.sweep --points`.

Right is what differences from both sides say, where these agree with each other, at two steps, and
add up over directions: there a function has a derivative. The points next to the degenerate one are
generic, so that the derivative by which a second one is tried is right there. Where there is no
derivative, forward and reverse mode are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.func import vmap

import gradkit
from gradkit import func
from tests.sweep import programs
from tests.sweep.programs import CLOSE, Case, Point, Scalar, attempt, close, dot, verdict

STEP = 2e-4
AGREE = 1e-6  # how far the differences may be from each other


def scaled(outputs: Scalar, point: Point) -> Scalar:
    """Return a scalar function of the outputs, in each of which it changes by about one."""
    at = outputs(*point).detach()
    kept = at.isfinite().nonzero().flatten()
    at = at[kept]
    size = at.abs().masked_fill(at.abs() < 1e-200, 1)
    weights = torch.linspace(0.5, 1.5, at.numel(), dtype=at.dtype, device=at.device)
    return lambda *x: (weights * torch.sin((outputs(*x)[kept] - at) / size + 0.3)).sum()


def directions(point: Point, *, relative: bool) -> list[Point]:
    """Return random directions; relative ones change each entry by a part of itself."""
    several = programs.directions(point, 3, seed=7)
    if relative:
        several = [tuple(t * x.abs() for t, x in zip(one, point, strict=True)) for one in several]
    return several


def from_a_side(fn: Scalar, point: Point, along: Point, step: float) -> tuple[Tensor, Tensor]:
    """Return the limits of a function and of its slope at a point, by four points beside it."""
    a, b, c, d = (
        fn(*(x + k * step * t for x, t in zip(point, along, strict=True))).detach()
        for k in (1, 2, 3, 4)
    )
    return 4 * a - 6 * b + 4 * c - d, (-26 * a + 57 * b - 42 * c + 11 * d) / (6 * step)


def slope(fn: Scalar, value: Tensor, point: Point, along: Point) -> Tensor | None:
    """Return a slope, None if those of the sides differ, or the function jumps from its value."""
    steps = (STEP, -STEP, 2.7 * STEP, -2.7 * STEP)
    values, slopes = zip(*(from_a_side(fn, point, along, step) for step in steps), strict=True)
    continuous = all(close(x, value, AGREE) for x in values)
    return slopes[0] if continuous and all(close(x, slopes[0], AGREE) for x in slopes) else None


def differences(fn: Scalar, value: Tensor, point: Point, along: Sequence[Point]) -> Tensor | None:
    """Return the derivative along the first of two directions, None if there is none."""
    both = tuple(a + b for a, b in zip(*along, strict=True))
    slopes = []
    for one in (*along, both):
        found = slope(fn, value, point, one)
        if found is None:
            return None
        slopes.append(found)
    first, second, total = slopes
    return first if close(first + second, total, 10 * AGREE) else None


Grads = Callable[[Tensor, Sequence[Tensor], bool], Sequence[Tensor]]


@dataclass(frozen=True)
class Library:
    """How derivatives are taken along a direction."""

    reverse: Callable[[Scalar, Point], Scalar]
    forward: Callable[[Scalar, Point], Scalar]
    grads: Grads  # of a loss that was computed, with a graph or without

    def derivative(self, fn: Scalar, stack: Sequence[str], along: Sequence[Point]) -> Scalar:
        """Return a derivative by a stack of transforms, the innermost of which is the last."""
        for kind, one in zip(reversed(stack), along, strict=True):
            fn = (self.reverse if kind == "Grad" else self.forward)(fn, one)
        return fn

    def eager(self, fn: Scalar, along: Sequence[Point]) -> Scalar:
        """Return a derivative by passes through graphs; the last one keeps none."""

        def last(*point: Tensor) -> Tensor:
            leaves = [x.detach().clone().requires_grad_() for x in point]
            value = fn(*leaves)
            for left, one in zip(range(len(along))[::-1], along, strict=True):
                value = dot(self.grads(value, leaves, left > 0), one)
            return value

        return last

    def checked(self, fn: Scalar, along: Sequence[Point]) -> Scalar:
        """Return a derivative by passes inside `gradkit.checked()`."""

        def last(*point: Tensor) -> Tensor:
            with gradkit.checked():
                return self.eager(fn, along)(*point)

        return last


def _torch_grads(loss: Tensor, leaves: Sequence[Tensor], more: bool) -> Sequence[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return torch.autograd.grad(loss, leaves, create_graph=more, materialize_grads=True)


def _grads(loss: Tensor, leaves: Sequence[Tensor], more: bool) -> Sequence[Tensor]:
    grads: Sequence[Tensor]
    grads = gradkit.value_and_grads(loss, leaves, unused="zeros", create_graph=more)[1]
    return grads


def _reverse(fn: Scalar, along: Point) -> Scalar:
    places = tuple(range(len(along)))
    return lambda *x: dot(func.value_and_grads(fn, argnums=places)(*x)[1], along)


def _forward(fn: Scalar, along: Point) -> Scalar:
    return lambda *x: func.jvp(fn, x, along)[1]


TORCH = Library(programs.reverse, programs.forward, _torch_grads)
GRADKIT = Library(_reverse, _forward, _grads)


def programs_of(
    library: Library, fn: Scalar, case: Case, other: Point, along: Sequence[Point]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the names of the derivatives along some directions, and what gives them."""
    order, point = len(along), case.point
    for stack in product(("Grad", "Jvp"), repeat=order):
        run, name = library.derivative(fn, stack, along), " ".join(stack)
        yield name, partial(run, *point)
        if order == 1 or name in {"Jvp Grad", "Grad Grad"}:
            alike = all(x.shape == y.shape for x, y in zip(point, other, strict=True))
            pairs = zip(point, other if alike else point, strict=True)
            pair = [torch.stack([x, y]) for x, y in pairs]
            yield f"Vmap {name}", partial(_of_first, run, pair)
    yield f"eager {order}", partial(library.eager(fn, along), *point)
    if library is GRADKIT:
        yield f"checked {order}", partial(library.checked(fn, along), *point)


def _of_first(run: Scalar, pairs: Sequence[Tensor]) -> Tensor:
    first: Tensor = vmap(run)(*pairs)[0]
    return first


Verdicts = dict[str, tuple[str, str]]  # by the program: that on torch, and on gradkit


def judge(case: Case, other: Point, *, relative: bool) -> Verdicts:
    """Return the verdicts on the derivatives at a point; `other` is a generic one."""
    verdicts: Verdicts = {}
    fn, along = scaled(case.outputs, case.point), directions(case.point, relative=relative)
    for order, right in enumerate(derivatives(case, along), start=1):
        theirs, ours = (
            {name: attempt(run) for name, run in programs_of(lib, fn, case, other, along[:order])}
            for lib in (TORCH, GRADKIT)
        )
        theirs[f"checked {order}"] = theirs[f"eager {order}"]
        if right is None:
            del ours[f"eager {order}"]  # which is torch's own, where gradkit looks at no graph
            verdicts[f"modes {order}"] = agreement(theirs), agreement(ours)
            continue
        for name in ours:
            verdicts[name] = verdict(theirs[name], right), verdict(ours[name], right)
    return verdicts


def derivatives(case: Case, along: Sequence[Point]) -> list[Tensor | None]:
    """Return the first and the second derivative by differences, None where there is none."""
    fn, (first, second, third) = scaled(case.meant or case.outputs, case.point), along
    try:
        one = differences(fn, fn(*case.point).detach(), case.point, [first, second])
        if one is None:
            return [None, None]
        slopes = TORCH.eager(fn, [first])
        return [one, differences(slopes, one, case.point, [second, third])]
    except Exception:  # beside the point, the operation does not take what it is given
        return [None, None]


def agreement(results: dict[str, Tensor | str]) -> str:
    """Return whether the finite ones of some results are equal."""
    finite = [x for x in results.values() if isinstance(x, Tensor) and bool(x.isfinite())]
    equal = all(close(x, finite[0], CLOSE) for x in finite)
    return "right" if equal else "wrong"
