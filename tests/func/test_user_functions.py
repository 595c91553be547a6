"""A user's Function under transforms of every nesting: against the same operations without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import grad, vmap

import gradkit
from gradkit import func

F64 = torch.float64
Fn: TypeAlias = Callable[[Tensor], Tensor]


class Square(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * dx


class Exp(Function):
    """Saves its output, as an attribute, too; its rule for vmap calls it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        ctx.scale = 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.saved_tensors[0] * g * ctx.scale / 2

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * dx * ctx.scale / 2

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Exp.apply(x), in_dims[0]


class Sin(Function):
    """Computes in setup_context what its jvp needs, and keeps an input as an attribute."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x.cos())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.saved_tensors[0].cos() * g

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * dx


class Product(Function):
    """Of two tensors, a number and text, with None for tangents that are not; also their order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor, power: int, how: str) -> Any:
        assert how == "by hand"
        return x * y**power, x + y, x > y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, y, ctx.power, _ = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, _: Any) -> Any:
        x, y = ctx.saved_tensors
        g = torch.zeros_like(x) if g is None else g
        h = torch.zeros_like(x) if h is None else h
        return g * y**ctx.power + h, g * x * ctx.power * y ** (ctx.power - 1) + h, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dy: Tensor | None, *_: Any) -> Any:
        x, y = ctx.saved_tensors
        dx = torch.zeros_like(x) if dx is None else dx
        dy = torch.zeros_like(y) if dy is None else dy
        return dx * y**ctx.power + dy * x * ctx.power * y ** (ctx.power - 1), dx + dy, None


class Tanh(Function):
    """Its jvp and its backward call another Function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (1 - Square.apply(ctx.saved_tensors[0])) * g

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return (1 - Square.apply(ctx.saved_tensors[0])) * dx


def call(function: Any, *args: Any) -> Any:
    return function.apply(*args)


# What a Function computes, and the same without one.
PAIRS: dict[str, tuple[Fn, Fn]] = {
    "square": (lambda x: call(Square, x), lambda x: x * x),
    "square of square": (lambda x: call(Square, call(Square, x)), lambda x: x**4),
    "saved output": (lambda x: call(Exp, x), torch.exp),
    "intermediate": (lambda x: call(Sin, x), torch.sin),
    "several": (
        lambda x: call(Product, x, x.sin(), 2, "by hand")[0] * call(Product, x, x, 3, "by hand")[1],
        lambda x: x * x.sin() ** 2 * (x + x),
    ),
    "one without tangent": (
        lambda x: call(Product, x, torch.full_like(x, 1.5), 2, "by hand")[0] ** 2,
        lambda x: (x * 1.5**2) ** 2,
    ),
    "calls another": (lambda x: call(Tanh, call(Tanh, x)), lambda x: x.tanh().tanh()),
}


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def by_gradkit(f: Fn) -> Fn:
    return lambda x: func.jvp(f, (x,), (x.cos().detach(),))[1]


def by_torch(f: Fn) -> Fn:
    return lambda x: torch.func.jvp(f, (x,), (ones(x),))[1]


def product(f: Fn) -> Fn:
    return lambda x: func.hvp(lambda x: f(x).sum(), x, ones(x))[1]


def reverse(f: Fn) -> Fn:
    return lambda x: func.value_and_grads(lambda x: f(x).sum())(x)[1]


def batched(f: Fn) -> Fn:
    return lambda x: vmap(f)(torch.stack([x, 2 * x])).sum(0)


def pushed(f: Fn) -> Fn:
    return lambda x: func.linearize(f, x)[1](ones(x))


def gauss_newton(f: Fn) -> Fn:
    return lambda x: func.ggn_vp(f, lambda y: (y**3).sum(), x, ones(x))[1]


# From the outermost.
NESTINGS: dict[str, list[Callable[[Fn], Fn]]] = {
    "jvp": [by_gradkit],
    "hvp": [product],
    "jvp, jvp": [by_gradkit, by_gradkit],
    "jvp, jvp, jvp": [by_gradkit, by_gradkit, by_gradkit],
    "jvp, hvp": [by_gradkit, product],
    "hvp, jvp": [product, by_gradkit],
    "hvp, hvp": [product, product],
    "torch, jvp": [by_torch, by_gradkit],
    "jvp, torch": [by_gradkit, by_torch],
    "torch, jvp, torch": [by_torch, by_gradkit, by_torch],
    "torch, hvp": [by_torch, product],
    "torch, torch, grads": [by_torch, by_torch, reverse],
    "grads, torch, torch": [reverse, by_torch, by_torch],
    "grads, jvp": [reverse, by_gradkit],
    "grads, hvp": [reverse, product],
    "jvp, grads, jvp": [by_gradkit, reverse, by_gradkit],
    "vmap, jvp, jvp": [batched, by_gradkit, by_gradkit],
    "jvp, vmap, jvp": [by_gradkit, batched, by_gradkit],
    "jvp, jvp, vmap": [by_gradkit, by_gradkit, batched],
    "jvp, hvp, vmap": [by_gradkit, product, batched],
    "jvp, linearize": [by_gradkit, pushed],
    "linearize, jvp": [pushed, by_gradkit],
    "jvp, ggn_vp": [by_gradkit, gauss_newton],
    "ggn_vp, jvp": [gauss_newton, by_gradkit],
}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_function_is_what_it_computes(device: torch.device, name: str, nesting: str) -> None:
    x = torch.rand(3, dtype=F64, device=device) + 0.1
    ours, plain = PAIRS[name]
    for derivative in reversed(NESTINGS[nesting]):
        ours, plain = derivative(ours), derivative(plain)
    torch.testing.assert_close(ours(x), plain(x))
    with gradkit.checked():
        torch.testing.assert_close(ours(x), plain(x))


class TripleInPlace(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 3 * g

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return dx.mul_(3)


def test_one_that_writes_in_place(device: torch.device) -> None:
    x = torch.rand(3, dtype=F64, device=device)
    ours = by_gradkit(by_gradkit(lambda x: call(TripleInPlace, x**2)))
    torch.testing.assert_close(ours(x), by_gradkit(by_gradkit(lambda x: 3 * x**2))(x))


class Reversed(Function):
    """Without a jvp."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.flip(0)


class TimesReversed(Square):
    """Its jvp calls a Function that has none."""

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        product: Tensor = 2 * call(Reversed, call(Reversed, x)) * dx
        return product


def test_a_jvp_may_call_what_has_none(device: torch.device) -> None:
    """What a level computes for its own tangents has no tangents of that level."""
    x = torch.rand(3, dtype=F64, device=device, requires_grad=True)
    expected = by_gradkit(lambda x: x * x)(x)
    got = by_gradkit(lambda x: call(TimesReversed, x))(x)
    torch.testing.assert_close(got, expected)
    slope = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), x))
    torch.testing.assert_close(
        reverse(by_gradkit(lambda x: call(TimesReversed, x)))(x),
        reverse(by_gradkit(lambda x: x * x))(x),
    )
    with pytest.raises(gradkit.UnsupportedGraphError, match="jvp"):
        by_gradkit(by_gradkit(lambda x: call(TimesReversed, x)))(x)


def test_check_grads_judges_the_function(device: torch.device) -> None:
    x = torch.rand(3, dtype=F64, device=device)
    func.check_grads(lambda x: call(Tanh, call(Square, x)).sum(), x, order=2)


def test_a_compiled_jvp_of_a_function_is_refused(device: torch.device) -> None:
    """torch.compile differentiates the code of its forward, and ignores its jvp."""
    x = torch.rand(3, dtype=F64, device=device)
    ours = by_gradkit(by_gradkit(PAIRS["square of square"][0]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="got Square under a vmap, a jvp"):
        torch.compile(ours, backend="aot_eager", fullgraph=True)(x)


class Unmaterialized(Function):
    """Its backward cannot be called without any cotangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x.sqrt(), y.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        assert g is not None or h is not None
        return None if g is None else g / (2 * ctx.saved_tensors[0]), h


class Materialized(Unmaterialized):
    """Its backward makes nan of the zeros that it would be given."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[0])


@pytest.mark.parametrize("function", [Unmaterialized, Materialized])
def test_no_backward_runs_for_a_derivative_that_is_zero(
    device: torch.device, function: Any
) -> None:
    """As under torch.func, whose gradient of a linear function leads nowhere."""
    zero, one = torch.zeros(2, dtype=F64, device=device), torch.ones(2, dtype=F64, device=device)

    def linear(y: Tensor, x: Tensor) -> Any:
        return (call(function, x, y)[0] + 3 * y).sum()

    def ours(x: Tensor) -> Any:
        return func.value_and_grads(linear)(one, x)[1].sum()

    def through(x: Tensor) -> Any:
        return func.value_and_grads(lambda y: 3 * y.sum())(call(function, x, one)[0])[1].sum()

    for of_x in (ours, through):
        assert torch.equal(func.value_and_grads(of_x)(zero)[1], zero)
        assert torch.equal(grad(of_x)(zero), zero)
        assert torch.equal(vmap(grad(of_x))(torch.stack([zero, one]))[0], zero)
        leaf = zero.clone().requires_grad_()
        assert torch.autograd.grad(of_x(leaf), leaf, allow_unused=True) == (None,)


def test_a_function_runs_where_a_cotangent_arrives(device: torch.device) -> None:
    """Once through a graph in which it was left out; and its node goes with the graph."""
    x = torch.full((2,), 4.0, dtype=F64, device=device, requires_grad=True)
    root = call(Unmaterialized, x, x)[0]
    slope = func.value_and_grads(lambda y: 3 * y.sum())(root)[1]
    alive = ref(root.grad_fn)
    assert torch.autograd.grad(slope.sum(), x, allow_unused=True, retain_graph=True) == (None,)
    (got,) = torch.autograd.grad((slope * root).sum(), x)
    torch.testing.assert_close(got, torch.full_like(x, 0.75))
    del root, slope
    assert alive() is None
