"""Functions of torch.special whose graph torch drops: right by formulas, in each mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradkit
from gradkit import func
from gradkit._torch_bugs.special_functions import SPECIAL_FUNCTIONS
from tests.helpers import unchanged

D = torch.float64
special = torch.special
BESSEL = sorted(name for name in SPECIAL_FUNCTIONS if "bessel" in name)
POLYNOMIALS = sorted(SPECIAL_FUNCTIONS.keys() - BESSEL)
REGULAR = [name for name in BESSEL if "_y" not in name and "_k" not in name]
Function = Callable[[Tensor], Tensor]


def along(kind: str, fn: Function) -> Function:
    """Return the derivative of a function of each element, by reverse or forward mode."""
    if kind == "Grad":
        return lambda x: func.value_and_grads(lambda x: fn(x).sum())(x)[1]
    return lambda x: func.jvp(fn, (x,), (torch.ones_like(x),))[1]


def derivative(fn: Function, stack: Sequence[str]) -> Function:
    for kind in reversed(stack):
        fn = along(kind, fn)
    return fn


def difference(fn: Function, x: Tensor, step: float = 1e-4) -> Tensor:
    def central(h: float) -> Tensor:
        return (fn(x + h) - fn(x - h)) / (2 * h)

    return (4 * central(step) - central(2 * step)) / 3


def of_order(name: str) -> Function:
    """Return a function of x alone; for polynomials, of orders from zero."""
    operation: Callable[..., Tensor] = getattr(special, name)
    if name in BESSEL:
        return operation
    return lambda x: operation(x, torch.arange(x.shape[-1], device=x.device))


def points(device: torch.device, name: str) -> Tensor:
    x = torch.tensor([0.31, 0.72, 1.4, 2.2, 3.3, 3.9], dtype=D, device=device)
    if name in REGULAR:
        return x * torch.tensor([1, -1, 1, 1, -1, 1], dtype=D, device=device)
    return x if name in BESSEL else x / 3 - 0.4


THIRD = {"bessel_j1", "scaled_modified_bessel_k0", "hermite_polynomial_h", "legendre_polynomial_p"}
ORDERS = [
    *((name, order) for name in SPECIAL_FUNCTIONS for order in (1, 2)),
    *(
        pytest.param(name, 3, marks=pytest.mark.long if name in THIRD else pytest.mark.slow)
        for name in SPECIAL_FUNCTIONS
    ),
]


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_every_derivative_of_an_order(device: torch.device, name: str, order: int) -> None:
    fn, x = of_order(name), points(device, name)
    for stack in product(("Grad", "Jvp"), repeat=order):
        below = derivative(fn, stack[1:])
        expected = difference(below, x)
        of_stack = derivative(fn, stack)
        torch.testing.assert_close(of_stack(x), expected, rtol=1e-6, atol=2e-6)
        if name in BESSEL:
            torch.testing.assert_close(torch.vmap(of_stack)(x[:, None])[:, 0], of_stack(x))


@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
def test_in_the_eager_calls_of_a_block(device: torch.device, name: str) -> None:
    fn, x = of_order(name), points(device, name).requires_grad_()
    with gradkit.checked():
        y = fn(x)
        _, grad = gradkit.value_and_grads(y.sum(), x, create_graph=True)
        _, second = gradkit.value_and_grads(grad.sum(), x, unused="zeros")
        rows = torch.stack(gradkit.per_loss_grads(list(fn(x)), x))
    expected = derivative(fn, ["Grad"])(x.detach())
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(rows.diagonal(), expected)
    torch.testing.assert_close(second, derivative(fn, ["Grad", "Grad"])(x.detach()))


@pytest.mark.parametrize("name", SPECIAL_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_the_value_is_that_of_the_operation(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    x = points(device, name).to(dtype).reshape(2, 3).mT
    args = () if name in BESSEL else (3,)
    operation = getattr(special, name)
    expected = operation(x, *args)
    aten = getattr(torch.ops.aten, f"special_{name}")
    with gradkit.checked():
        leaf = x.clone().requires_grad_()
        ours = (
            [operation(leaf, *args), aten(leaf, *args), aten.default(leaf, *args)]
            if (name in BESSEL)
            else [operation(leaf, *args), aten(leaf, *args), operation(x=leaf, n=3)]
        )
    for value in [*ours, func.jvp(lambda x: operation(x, *args), (x,), (x,))[0]]:
        assert torch.equal(value, expected)
        assert (value.dtype, value.stride()) == (dtype, expected.stride())


@pytest.mark.parametrize("name", BESSEL)
def test_bessel_functions_obey_their_equation(device: torch.device, name: str) -> None:
    """DLMF 10.2.1, 10.25.1, 10.47.1; scaled ones are exp(x) times these."""
    x = torch.tensor([0.05, 0.6, 1.7, 3.0, 4.4], dtype=D, device=device)
    fn: Function = getattr(special, name)
    if name.startswith("scaled"):
        plain = fn

        def fn(x: Tensor) -> Tensor:
            return (-x).exp() * plain(x)

    n = int(name[-1])
    first, second = derivative(fn, ["Grad"])(x), derivative(fn, ["Jvp", "Grad"])(x)
    friction, sign = (2, 1) if "spherical" in name else (1, -1 if "modified" in name else 1)
    rest = (sign * x**2 - n**2) * fn(x)
    terms = torch.stack([x**2 * second, friction * x * first, rest])
    scale = terms.abs().max(0).values
    torch.testing.assert_close(terms.sum(0) / scale, torch.zeros_like(x), rtol=0, atol=1e-7)


AT_ZERO = {
    "bessel_j0": [0, -1 / 2, 0, 3 / 8],
    "bessel_j1": [1 / 2, 0, -3 / 8, 0],
    "modified_bessel_i0": [0, 1 / 2, 0, 3 / 8],
    "modified_bessel_i1": [1 / 2, 0, 3 / 8, 0],
    "spherical_bessel_j0": [0, -1 / 3, 0, 1 / 5],
}


@pytest.mark.parametrize("name", AT_ZERO)
@pytest.mark.parametrize("kind", ["Grad", "Jvp"])
def test_derivatives_at_zero(device: torch.device, name: str, kind: str) -> None:
    zero = torch.zeros((), dtype=D, device=device)
    found = [derivative(getattr(special, name), [kind] * n)(zero).item() for n in range(1, 5)]
    assert found == pytest.approx(AT_ZERO[name], abs=1e-15)


@given(n=st.integers(0, 12), at=st.floats(-1.5, 1.5))
def test_derivatives_of_polynomials(device: torch.device, n: int, at: float) -> None:
    """DLMF 18.9.21, 18.9.23, 18.9.25 and 18.9.27; 14.10.5 of Legendre's."""
    x = torch.tensor(at, dtype=D, device=device)

    def slope(name: str, n: int) -> Tensor:
        return derivative(lambda x: getattr(special, name)(x, n), ["Grad"])(x)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-7)

    name = "chebyshev_polynomial"
    close(slope(f"{name}_t", n), n * special.chebyshev_polynomial_u(x, n - 1))
    of_shifted = 2 * n * special.shifted_chebyshev_polynomial_u(x, n - 1)
    close(slope(f"shifted_{name}_t", n), of_shifted)
    close(slope("hermite_polynomial_h", n), 2 * n * special.hermite_polynomial_h(x, n - 1))
    close(slope("hermite_polynomial_he", n), n * special.hermite_polynomial_he(x, n - 1))
    name = "laguerre_polynomial_l"
    close(slope(name, n + 1) - slope(name, n), -special.laguerre_polynomial_l(x, n))
    name = "legendre_polynomial_p"
    of_two = slope(name, n + 2) - slope(name, n)
    close(of_two, (2 * n + 3) * special.legendre_polynomial_p(x, n + 1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, under vmap
def test_orders_in_a_batch_and_of_other_kinds(device: torch.device) -> None:
    orders = torch.tensor([0, 3, -2, 5], dtype=D, device=device)
    x = torch.linspace(-0.9, 0.9, 4, dtype=D, device=device)
    operation = special.legendre_polynomial_p

    def slope(n: int | Tensor) -> Function:
        return derivative(lambda x: operation(x, n), ["Grad"])

    expected = torch.stack([slope(n)(at) for n, at in zip([0, 3, -2, 5], x, strict=True)])
    torch.testing.assert_close(slope(orders)(x), expected)
    torch.testing.assert_close(torch.vmap(lambda x, n: slope(n)(x))(x, orders), expected)
    assert slope(orders[:0])(x[:0]).shape == (0,)
    large = torch.tensor([1, 300], device=device)  # which overflows where it stands alone
    at = torch.tensor([1e5, 0.5], dtype=D, device=device)
    assert slope(large)(at)[0] == 1


@pytest.mark.parametrize("name", ["bessel_y1", "hermite_polynomial_h"])
def test_out_is_refused_where_it_would_lose_the_derivative(device: torch.device, name: str) -> None:
    x, out = points(device, name).requires_grad_(), torch.empty(6, dtype=D, device=device)
    args = () if name in BESSEL else (2,)
    operation = getattr(special, name)
    with gradkit.checked():
        with unchanged(x), pytest.raises(gradkit.UnsupportedGraphError, match="leave out out="):
            operation(x, *args, out=out)
        operation(x.detach(), *args, out=out)
    assert torch.equal(out, operation(x.detach(), *args))


@pytest.mark.long
def test_inside_of_a_compiled_function(device: torch.device) -> None:
    x = points(device, "bessel_j0")

    def slope(x: Tensor) -> Tensor:
        return func.value_and_grads(lambda x: special.bessel_j0(x).sum())(x)[1]

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        torch.compile(slope, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: func.value_and_grads(lambda x: special.legendre_polynomial_p(x, 3).sum())(x)[1],
        backend="aot_eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(x), (15 * x**2 - 3) / 2)
    torch._dynamo.reset()


class Airy(torch.autograd.Function):
    """Ai, whose derivative is a difference."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return special.airy_ai(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * difference(special.airy_ai, x.detach())


def test_airy_is_refused_and_the_advice_runs(device: torch.device) -> None:
    x = torch.tensor([0.5, -1.0], dtype=D, device=device)
    refused = pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.special\.airy_ai.*zero")
    for kind in ("Grad", "Jvp"):
        with refused:
            derivative(special.airy_ai, [kind])(x)
        with refused:
            torch.vmap(derivative(special.airy_ai, [kind]))(x[None])
    expected = difference(special.airy_ai, x)
    torch.testing.assert_close(derivative(Airy.apply, ["Grad"])(x), expected)
    leaf = x.clone().requires_grad_()
    with gradkit.checked():
        with refused:
            special.airy_ai(leaf)
        _, of_constant = gradkit.value_and_grads(
            (special.airy_ai(leaf.detach()) * leaf).sum(), leaf
        )
        _, of_function = gradkit.value_and_grads(Airy.apply(leaf).sum(), leaf)
    assert torch.equal(of_constant, special.airy_ai(x))
    torch.testing.assert_close(of_function, expected)


def test_meta_losses(device: torch.device) -> None:
    w = torch.tensor([1.3, 0.4], dtype=D, device=device, requires_grad=True)
    rate = torch.tensor(0.1, dtype=D, device=device, requires_grad=True)

    def unrolled(fn: Function, w: Tensor, rate: Tensor) -> Tensor:
        steps = gradkit.meta.unroll(
            lambda p, _, b: (fn(p) * p).sum(), w, [None] * 2, gradkit.meta.sgd(rate)
        )
        return steps.params.square().sum()

    _, (of_w, of_rate) = gradkit.value_and_grads(unrolled(special.bessel_j1, w, rate), [w, rate])

    def at(w: Tensor, rate: Tensor) -> Tensor:
        return unrolled(special.bessel_j1, w.requires_grad_(), rate).detach()

    step = 1e-5
    of_first = torch.tensor([step, 0], dtype=D, device=device)
    start, speed = w.detach(), rate.detach()
    slopes = [
        (at(start + of_first, speed) - at(start - of_first, speed)) / (2 * step),
        (at(start.clone(), speed + step) - at(start.clone(), speed - step)) / (2 * step),
    ]
    torch.testing.assert_close(torch.stack([of_w[0], of_rate]), torch.stack(slopes))
    with pytest.raises(gradkit.UnsupportedGraphError, match="airy_ai"):
        unrolled(special.airy_ai, w, rate)


ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linspace": lambda a, b: torch.linspace(a, b, 5, dtype=D),
    "by name": lambda a, b: torch.linspace(start=a, end=b, steps=4).to(D),
    "logspace": lambda a, b: torch.logspace(a, b, 5, base=3.0, dtype=D),
    "operator": lambda a, b: torch.ops.aten.logspace.Tensor_Tensor(a, b, 3).to(D),
    "one end": lambda a, b: torch.linspace(2.0, b, 5, dtype=D).to(a) * a,
}


@pytest.mark.parametrize("name", ENDS)
def test_points_between_tensors(device: torch.device, name: str) -> None:

    def fn(*ends: Tensor) -> Tensor:
        return ENDS[name](*ends).to(device)  # torch makes them on the CPU, without device=

    ends = [torch.tensor(v, dtype=D, device=device) for v in (1.0, 2.5)]
    value, (by_start, by_end) = func.value_and_grads(lambda *x: fn(*x).sum(), (0, 1))(*ends)
    assert torch.equal(value, fn(*ends).sum())
    steps = 1e-2, 1e-2  # without a dtype it has few digits
    for grad, along in ((by_start, (1, 0)), (by_end, (0, 1))):
        ahead, behind = (
            fn(*(x + s * h * t for x, h, t in zip(ends, steps, along, strict=True))).sum()
            for s in (1, -1)
        )
        torch.testing.assert_close(grad, (ahead - behind) / 2e-2, rtol=2e-3, atol=1e-4)
        direction = tuple(x.new_tensor(t) for x, t in zip(ends, along, strict=True))
        torch.testing.assert_close(
            func.jvp(fn, tuple(ends), direction)[1].sum(), grad, rtol=1e-5, atol=1e-5
        )
    leaves = [x.requires_grad_() for x in ends]
    with gradkit.checked():
        _, eager = gradkit.value_and_grads(fn(*leaves).sum(), leaves)
    torch.testing.assert_close(list(eager), [by_start, by_end])


def test_a_sample_of_normal_is_refused_where_it_is_differentiated(device: torch.device) -> None:
    mean, std = (torch.full((3,), v, dtype=D, device=device) for v in (0.5, 2.0))
    refused = pytest.raises(gradkit.UnsupportedGraphError, match=r"torch\.normal.*silently zero")

    def sampled(draw: Callable[..., Tensor], *args: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda mean, std: (draw(*args, mean, std)).sum()

    for kind in (torch.normal, torch.ops.aten.normal.Tensor_Tensor):
        with refused:
            func.value_and_grads(sampled(kind), (0, 1))(mean, std)
        with refused:
            func.jvp(sampled(kind), (mean, std), (mean, std))
    with refused:
        func.value_and_grads(lambda mean: torch.normal(mean, 1.0).sum())(mean)

    def reparametrized(mean: Tensor, std: Tensor) -> Tensor:
        torch.manual_seed(0)
        return (mean + std * torch.randn_like(mean)).sum()

    def as_constant(mean: Tensor, std: Tensor) -> Tensor:
        sample = torch.normal(mean.detach(), std.detach())
        return ((sample - mean) / std).sum()

    _, (by_mean, by_std) = func.value_and_grads(reparametrized, (0, 1))(mean, std)
    torch.manual_seed(0)
    assert torch.equal(by_mean, torch.ones_like(mean))
    assert torch.equal(by_std, torch.randn_like(mean))
    _, (by_mean, _) = func.value_and_grads(as_constant, (0, 1))(mean, std)
    torch.testing.assert_close(by_mean, -1 / std)


def test_samples_under_no_grad_and_of_distributions(device: torch.device) -> None:
    mean, std = (torch.full((3,), v, device=device, requires_grad=True) for v in (0.5, 2.0))

    def drawn(mean: Tensor, std: Tensor) -> Tensor:
        normal = torch.distributions.Normal(mean, std)
        with torch.no_grad():
            torch.normal(mean, std)
        return normal.log_prob(normal.sample()).sum() + normal.rsample().sum()

    with gradkit.checked():
        torch.manual_seed(0)
        _, eager = gradkit.value_and_grads(drawn(mean, std), [mean, std])
    torch.manual_seed(0)
    _, ours = func.value_and_grads(drawn, (0, 1), create_graph=False)(mean, std)
    torch.manual_seed(0)
    theirs = torch.autograd.grad(drawn(mean, std), [mean, std])
    for other in (eager, ours):
        torch.testing.assert_close(list(other), list(theirs))
