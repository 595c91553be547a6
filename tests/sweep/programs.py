"""Every derivative of a call that torch's transforms make, and the right value of each.

A program has the name of its stack of transforms, from the outermost: "Jvp Grad" is forward over
reverse. In "Grad +Vmap" the backward pass alone is batched, and "eager 2" is the second derivative
by `create_graph=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from gradkit._compat.nodes import kind_of_node
from gradkit._core.graph import nodes_below

Point = tuple[Tensor, ...]
Mask = tuple[bool, ...]  # which tensors of a point are batched
Scalar = Callable[..., Tensor]  # of the tensors of a point

STEP = 2e-4  # of the differences, along a direction of length one
SMOOTH = 1e-6  # how far differences of two steps may be from each other
CLOSE = 1e-5  # how far a derivative may be from the differences
EQUAL = 1e-8  # how far a batch may be from its elements, one by one


@dataclass(frozen=True)
class Case:
    """A call of an operation, as a function of its floating-point tensors.

    Attributes:
        operation: Its name, as gradkit's table has it.
        outputs: Returns all outputs of the call, as one real vector.
        point: Where it is differentiated.
        meant: The function that the derivatives are of, if not `outputs`: an operation that takes a
            matrix for symmetric reads a half of it.
    """

    operation: str
    outputs: Scalar
    point: Point
    meant: Scalar | None = None


def scalar(outputs: Scalar) -> Scalar:
    """Return a scalar function of the outputs that is linear in none of them."""

    def total(*x: Tensor) -> Tensor:
        y = outputs(*x)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype, device=y.device)
        return (weights * torch.sin(y + 0.3)).sum()

    return total


def with_zero_cotangents(case: Case) -> Case:
    """Return a case of one output, which has a derivative of zero by many of the outputs."""
    at = case.outputs(*case.point).detach()
    # Three kinds, in turn: it is zero at the point alone; it is not; it is everywhere.
    turn = torch.arange(len(at), device=at.device) % 3
    flat, kept = (turn == 0).to(at.dtype), (turn == 1).to(at.dtype)

    def of(outputs: Scalar) -> Scalar:
        def one(*x: Tensor) -> Tensor:
            y = outputs(*x)
            product = (kept * torch.sin(y + 0.3)).sum().square()
            return (product + (flat * (1 - torch.cos(y - at))).sum())[None]

        return one

    return Case(case.operation, of(case.outputs), case.point, case.meant and of(case.meant))


def directions(point: Point, count: int, seed: int = 1) -> list[Point]:
    """Return random directions of length one."""
    generator = torch.Generator().manual_seed(seed)
    several = []
    for _ in range(count):
        along = [torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x) for x in point]
        length = dot(along, along).sqrt()
        several.append(tuple(t / length for t in along))
    return several


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the real inner product of two points."""
    return torch.stack([(x * y.conj()).real.sum() for x, y in zip(a, b, strict=True)]).sum()


def reverse(fn: Scalar, along: Point) -> Scalar:
    """Return the derivative of a function along a direction, by reverse mode."""
    return lambda *x: dot(grad(fn, argnums=tuple(range(len(x))))(*x), along)


def forward(fn: Scalar, along: Point) -> Scalar:
    """Return the derivative of a function along a direction, by forward mode."""
    return lambda *x: jvp(fn, x, along)[1]


def linearized(fn: Scalar, along: Point) -> Scalar:
    """Return the derivative of a function along a direction, by reverse mode twice."""

    def slope(*x: Tensor) -> Tensor:
        value, pull = vjp(fn, *x)  # type: ignore[misc]
        product: Tensor = vjp(pull, torch.ones_like(value))[1](along)[0]
        return product

    return slope


def derivative(fn: Scalar, stack: Sequence[str], along: Sequence[Point]) -> Scalar:
    """Return a derivative by a stack of transforms, the innermost of which is the last."""
    for kind, one in zip(reversed(stack), along, strict=True):
        fn = (reverse if kind == "Grad" else forward)(fn, one)
    return fn


def kinds(case: Case, passes: int) -> set[str]:
    """Return the kinds of nodes that the last of some passes has added to the graph."""
    values = eager(scalar(case.outputs), case.point, directions(case.point, passes))
    graphs = [nodes_below([v] if v.requires_grad else []) for v in reversed(values)]
    now, *before = [{kind_of_node(node) for node in graph} for graph in graphs]
    return now.difference(*before)


def eager(fn: Scalar, point: Point, along: Sequence[Point]) -> list[Tensor]:
    """Return a value and its derivatives by autograd's `create_graph`, each with its graph."""
    leaves = [x.detach().clone().requires_grad_() for x in point]
    values = [fn(*leaves)]
    for one in along:
        grads: Sequence[Tensor] = [torch.zeros_like(x) for x in leaves]
        if values[-1].requires_grad:
            grads = torch.autograd.grad(
                values[-1], leaves, create_graph=True, materialize_grads=True
            )
        values.append(dot(grads, one))
    return values


def _last(fn: Scalar, along: Sequence[Point], *point: Tensor) -> Tensor:
    return eager(fn, point, along)[-1]


def difference(fn: Scalar, point: Point, along: Point) -> Tensor | None:
    """Return a derivative by differences of fourth order, None where the function is not smooth."""

    def at(step: float) -> Tensor:
        return fn(*(x + step * t for x, t in zip(point, along, strict=True))).detach()

    def central(step: float) -> Tensor:
        return (8 * (at(step) - at(-step)) - at(2 * step) + at(-2 * step)) / (12 * step)

    fine, coarse = central(STEP), central(2.7 * STEP)
    return fine if close(coarse, fine, SMOOTH) else None


def close(got: Tensor, right: Tensor, tolerance: float) -> bool:
    """Return whether two values are equal; not if either is not finite."""
    return bool(((got - right).abs() <= tolerance * (1 + right.abs().max())).all())


def attempt(run: Callable[[], Tensor]) -> Tensor | str:
    """Return what a program gives, or the name of the error that it raises."""
    try:
        return run().detach()
    except Exception as error:
        return f"raises {type(error).__name__}"


def verdict(got: Tensor | str, right: Tensor, tolerance: float = CLOSE) -> str:
    """Return whether a program is right, wrong, not finite, or raises."""
    if isinstance(got, str):
        return got
    if close(got, right, tolerance):
        return "right"
    return "wrong" if torch.isfinite(got).all() else "not finite"


def of_orders(case: Case, orders: int) -> dict[str, str]:
    """Return a verdict on every stack of derivatives, each order by differences of the one below.

    An order is tried only if something computes the one below it rightly.
    """
    verdicts: dict[str, str] = {}
    fn, along = scalar(case.outputs), directions(case.point, orders)
    below: Scalar | None = scalar(case.meant or case.outputs)
    for order in range(1, orders + 1):
        if below is None or (right := difference(below, case.point, along[order - 1])) is None:
            break
        below = case.meant and derivative(scalar(case.meant), ("Grad",) * order, along[:order])
        for stack in product(("Grad", "Jvp"), repeat=order):
            run, name = derivative(fn, stack, along[:order]), " ".join(stack)
            verdicts[name] = verdict(attempt(partial(run, *case.point)), right)
            if verdicts[name] == "not finite" and stack[0] == "Grad":
                # The nan may be lost on the way that func.linearize takes.
                inner = derivative(fn, stack[1:], along[: order - 1])
                twice = partial(linearized(inner, along[order - 1]), *case.point)
                verdicts[name] = max(verdicts[name], verdict(attempt(twice), right), key=severity)
            if verdicts[name] == "right":
                below = below or run
        by_eager = partial(_last, fn, along[:order])
        verdicts[f"eager {order}"] = verdict(attempt(partial(by_eager, *case.point)), right)
        if below is None and verdicts[f"eager {order}"] == "right":
            below = by_eager
    return verdicts


def masks(count: int) -> Iterator[Mask]:
    """Yield which of some tensors are batched: all of them, and each alone."""
    yield (True,) * count
    if 1 < count <= 3:
        yield from (tuple(i == j for j in range(count)) for i in range(count))


def dims(mask: Mask) -> tuple[int | None, ...]:
    """Return `in_dims` for a mask."""
    return tuple(0 if batched else None for batched in mask)


def other(x: Tensor, step: int, *, flipped: bool) -> Tensor:
    """Return another sample, beside or in another order, so that batches mixed up show."""
    if step == 0:
        return x
    return (x.flatten().flip(0).reshape(x.shape) if flipped else x) * (1 + 0.02 * step)


def batch(point: Point, mask: Mask, size: int, *, flipped: bool = False) -> Point:
    """Return a point in which some tensors are batched."""
    return tuple(
        torch.stack([other(x, k, flipped=flipped) for k in range(size)]) if batched else x
        for x, batched in zip(point, mask, strict=True)
    )


def sample(point: Point, mask: Mask, index: int) -> Point:
    """Return one sample of a batch, in memory of its own."""
    pairs = zip(point, mask, strict=True)
    return tuple(x[index].clone() if batched else x for x, batched in pairs)


def looped(fn: Scalar, mask: Mask, size: int) -> Scalar:
    """Return what vmap does, one sample after the other."""
    return lambda *x: torch.stack([fn(*sample(x, mask, index)) for index in range(size)])


Pair = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]  # a program, what it gives, and right


def pair(name: str, ways: Sequence[Scalar], point: Point) -> Pair:
    """Return a program, and what is right in its place, at a point."""
    got, right = ways
    return name, partial(got, *point), partial(right, *point)


def batched(case: Case) -> Iterator[Pair]:
    """Yield the programs with a vmap, and what a loop gives in its place."""
    fn = scalar(case.outputs)
    t, u = directions(case.point, 2)
    inner = {"": (), "Grad": ("Grad",), "Jvp": ("Jvp",), "Grad Grad": ("Grad", "Grad")}
    for mask in masks(len(case.point)):
        points = batch(case.point, mask, 2)
        along = directions(points, 2, seed=2)
        for name, stack in inner.items():
            one = derivative(fn, stack, [t, u][: len(stack)])
            ways = vmap(one, dims(mask)), looped(one, mask, 2)
            yield pair(f"Vmap {name}", ways, points)
            for outer in ("Grad", "Jvp", "Grad Grad"):
                if len(outer.split()) + len(stack) <= 2:
                    sums = [lambda *x, way=way: way(*x).sum() for way in ways]
                    runs = [derivative(s, outer.split(), along[: len(outer.split())]) for s in sums]
                    yield pair(f"{outer} Vmap {name}", runs, points)


def batched_twice(case: Case) -> Iterator[Pair]:
    """Yield the programs with two vmaps, and what loops give in their place."""
    fn, (t,) = scalar(case.outputs), directions(case.point, 1)
    several = [(a, b) for a in masks(len(case.point)) for b in masks(len(case.point))]
    for (outer, inner), flipped in product(several[:10], (False, True)):
        points = batch(case.point, inner, 2, flipped=flipped)
        grid = tuple(
            torch.stack([other(x, 3 * k, flipped=flipped) for k in range(2)]) if a else x
            for x, a in zip(points, outer, strict=True)
        )
        for name, stack in {"": (), "Grad": ("Grad",), "Jvp": ("Jvp",)}.items():
            one = derivative(fn, stack, [t][: len(stack)])
            got = vmap(vmap(one, dims(inner)), dims(outer))
            right = looped(looped(one, inner, 2), outer, 2)
            yield pair(f"Vmap Vmap {name}", (got, right), grid)


def pulled(case: Case) -> Iterator[Pair]:
    """Yield the programs with a batched backward pass, and what single passes give."""
    t, u = directions(case.point, 2)
    size = case.outputs(*case.point).numel()
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randn(2, size, dtype=torch.float64, generator=generator).to(t[0].device)

    def slopes(*x: Tensor, together: bool) -> Tensor:
        _, pull = vjp(lambda *y: case.outputs(*y).sin(), *x)  # type: ignore[misc]
        if together:
            return vmap(lambda seed: dot(pull(seed), t))(seeds)
        return torch.stack([dot(pull(seed), t) for seed in seeds])

    ways = [partial(slopes, together=together) for together in (True, False)]
    yield pair("Grad +Vmap", ways, case.point)
    squares = [lambda *x, way=way: way(*x).square().sum() for way in ways]
    runs = [derivative(square, ("Grad",), [u]) for square in squares]
    yield pair("Grad Grad +Vmap", runs, case.point)


def verdicts_of(case: Case, orders: int = 3) -> dict[str, str]:
    """Return a verdict on every program; of several with one name, the worst."""
    verdicts = of_orders(case, orders)
    if "wrong" in (verdicts.get("Grad"), verdicts.get("eager 1")):
        return verdicts
    for name, another in of_orders(with_zero_cotangents(case), min(orders, 2)).items():
        verdicts[name] = max(another, verdicts.get(name, "right"), key=severity)
    for make in (batched, pulled, batched_twice):
        for name, run, oracle in make(case):
            right = attempt(oracle)
            if isinstance(right, str) or not torch.isfinite(right).all():
                continue
            key = name.strip()
            several = verdict(attempt(run), right, EQUAL), verdicts.get(key, "right")
            verdicts[key] = max(several, key=severity)
    return verdicts


def severity(verdict: str) -> int:
    """Return how bad a verdict is."""
    return ("right", "raises", "not", "wrong").index(verdict.split(" ")[0])
