"""The formulas are right at the edges of operations: the oracle is the function written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gradkit
from gradkit import func
from gradkit._torch_bugs.table import FORMULAS
from tests.checks.test_smooth_formulas import D, assert_derivatives, random
from tests.helpers import others_slow

Function = Callable[[Tensor], Tensor]
SEEN = "an operation whose derivative torch gets right here"


def _pair(fn: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Return a function of two rows, so that derivatives mix them."""
    return lambda x: fn(*x).sum()


def raised_in_place(x: Tensor, y: Tensor) -> Tensor:
    power = x * 1
    power **= y
    return power


POWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.pow": torch.pow,
    "**": lambda x, y: x**y,
    "**=": raised_in_place,
    "pow_": lambda x, y: (x * 1).pow_(y),
    "float_power": torch.float_power,
}


@pytest.mark.parametrize("name", POWERS)
def test_powers_whose_exponent_is_zero(device: torch.device, name: str) -> None:
    point = torch.tensor([[1.5, 0.5, 2.0], [0.0, 2.0, 0.0]], dtype=D, device=device)
    assert_derivatives(_pair(POWERS[name]), _pair(lambda x, y: (y * x.log()).exp()), point)


def test_a_power_of_zero_and_of_a_negative_base_stays_as_it_is(device: torch.device) -> None:
    base = torch.tensor([0.0, -2.0, 0.0], dtype=D, device=device)
    powers = torch.tensor([0.0, 0.0, 2.0], dtype=D, device=device)
    product = func.hvp(lambda x: (x**powers).sum(), base, torch.ones_like(base))[1]
    assert product.tolist() == [0, 0, 2]


def test_polar_of_a_radius_of_zero_and_of_a_negative_one(device: torch.device) -> None:
    def parts(polar: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        real, imaginary = polar(*x)
        return (real.square() + real + 2 * imaginary).sum()

    def by_torch(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.polar(radius, angle)
        return value.real, value.imag

    def written(radius: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        return radius * angle.cos(), radius * angle.sin()

    point = torch.tensor([[0.0, -1.5, 2.0], [0.3, 0.0, 1.0]], dtype=D, device=device)
    assert_derivatives(partial(parts, by_torch), partial(parts, written), point)


TARGET = torch.tensor([1.0, 0.3, 0.0, 0.9], dtype=D)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=D)


def entropy_of_logits(x: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(x, TARGET.to(x), reduction="none")


REDUCTIONS: dict[str, tuple[dict[str, Any], Function]] = {
    "none": ({"reduction": "none"}, lambda x: x),
    "sum": ({"reduction": "sum"}, torch.sum),
    "mean": ({}, torch.mean),
    "weighted": ({"weight": WEIGHT}, lambda x: (x * WEIGHT.to(x)).mean()),
    "an old flag": ({"size_average": False}, torch.sum),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_binary_cross_entropy_of_a_saturated_sigmoid(device: torch.device, name: str) -> None:
    options, reduced = REDUCTIONS[name]
    options = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in options.items()}
    logits = torch.tensor([-30.0, -40.0, -60.0, 0.5], dtype=D, device=device)

    def slope(x: Tensor, loss: Function) -> Tensor:
        return func.value_and_grads(lambda x: loss(x).sum())(x)[1]

    def loss(x: Tensor) -> Tensor:
        return functional.binary_cross_entropy(x.sigmoid(), TARGET.to(x), **options)

    right = slope(logits, lambda x: reduced(entropy_of_logits(x)))
    torch.testing.assert_close(slope(logits, loss), right, rtol=1e-9, atol=1e-12)
    batched = torch.vmap(lambda x: slope(x, loss))(torch.stack([logits, logits]))[1]
    torch.testing.assert_close(batched, right, rtol=1e-9, atol=1e-12)
    leaf = logits.clone().requires_grad_()
    with gradkit.checked():
        grads = gradkit.value_and_grads(loss(leaf).sum(), leaf)[1]
    torch.testing.assert_close(grads, right, rtol=1e-9, atol=1e-12)


def test_binary_cross_entropy_of_zero_and_one_stays_as_it_is(device: torch.device) -> None:
    point = torch.tensor([0.0, 1.0, 1e-14], dtype=D, device=device)
    target = torch.tensor([0.0, 1.0, 0.0], dtype=D, device=device)
    value, grads = func.value_and_grads(functional.binary_cross_entropy)(point, target)
    assert value.isfinite()
    torch.testing.assert_close(grads, torch.tensor([0.0, 0.0, 1 / 3], dtype=D, device=device))


def test_a_threshold_of_zero(device: torch.device) -> None:
    point = torch.tensor([0.0, 1.0, -2.0], dtype=D, device=device)
    assert_derivatives(lambda x: functional.softshrink(x, 0.0).sin().sum(), _sum_of_sines, point)
    assert_derivatives(lambda x: functional.hardshrink(x, 0.0).sin().sum(), _sum_of_sines, point)


def _sum_of_sines(x: Tensor) -> Tensor:
    return x.sin().sum()


@pytest.mark.parametrize("scale", [0.0, 0.1, 10.0])
def test_cosine_similarity_below_its_eps(device: torch.device, scale: float) -> None:
    y, eps = random(2, 3, seed=4).to(device), 0.5

    def written(x: Tensor) -> Tensor:
        lengths = [eps if scale < 1 else row.norm() for row in x]
        return torch.stack([
            (row @ other) / length / other.norm().clamp_min(eps)
            for row, other, length in zip(x, y, lengths, strict=True)
        ]).sum()  # fmt: skip

    point = scale * random(2, 3, seed=3).to(device) / 3
    assert_derivatives(lambda x: functional.cosine_similarity(x, y, eps=eps).sum(), written, point)


def test_both_modes_ignore_the_clamp_of_a_variance(device: torch.device) -> None:
    x, target, variance = (t.to(device) for t in (random(3), random(3, seed=1), TARGET[:3] / 10))
    along = random(3, seed=2).to(device)

    def loss(variance: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(x, target, variance, eps=0.5)

    right = (torch.func.grad(loss)(variance) * along).sum()
    torch.testing.assert_close(func.jvp(loss, (variance,), (along,))[1], right)
    with pytest.raises(ValueError, match="negative"):
        func.jvp(loss, (-variance - 1,), (along,))


@pytest.mark.parametrize(
    "vander", [torch.linalg.vander, torch.vander, partial(torch.vander, increasing=True)]
)
def test_vander_at_zero(device: torch.device, vander: Function) -> None:
    def written(x: Tensor) -> Tensor:
        powers = [torch.ones_like(x), x, x * x, x * x * x]
        return torch.stack(powers if rising else powers[::-1], -1)

    rising = vander is not torch.vander
    point = torch.tensor([0.0, 0.0, 2.0, -1.0], dtype=D, device=device)
    weights = random(4, 4).to(device)
    fns = [lambda x, f=f: (f(x).sin() * weights).sum() for f in (vander, written)]
    for mode in ("forward-over-reverse", "reverse-over-reverse"):
        products = [func.hvp(fn, point, weights[0], mode=mode)[1] for fn in fns]
        torch.testing.assert_close(*products)

    def twice(fn: Function, x: Tensor) -> Tensor:
        return func.jvp(lambda x: func.jvp(fn, (x,), (weights[0],))[1], (x,), (weights[1],))[1]

    torch.testing.assert_close(*(twice(fn, point) for fn in fns))


@pytest.mark.parametrize("shapes", [[(0,), (2,)], [(), (0,), (2, 2)], [(2,), (0,), (0, 3), (1, 2)]])
def test_block_diag_of_an_empty_vector(device: torch.device, shapes: list[tuple[int, ...]]) -> None:
    blocks = [random(*shape).to(device) for shape in shapes]
    weights = random(*torch.block_diag(*blocks).shape).to(device)
    right, row, column = [], 0, 0
    for block in blocks:
        height, width = torch.atleast_2d(block).shape
        part = weights[row : row + height, column : column + width]
        right.append(part.reshape(block.shape))
        row, column = row + height, column + width
    assert weights.shape == (row, column)

    def loss(blocks: list[Tensor]) -> Tensor:
        return (torch.block_diag(*blocks) * weights).sum()

    grads = func.value_and_grads(loss)(blocks)[1]
    leaves = [block.clone().requires_grad_() for block in blocks]
    with gradkit.checked():
        eager = gradkit.value_and_grads(loss(leaves), leaves)[1]
    for got, also, expected in zip(grads, eager, right, strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(also, expected)


EDGES: dict[str, tuple[Function, Tensor]] = {
    "polar": (lambda x: torch.view_as_real(torch.polar(x, x + 1)).sum(), torch.zeros(2, dtype=D)),
    "binary_cross_entropy": (
        lambda x: functional.binary_cross_entropy(x, torch.ones_like(x)),
        torch.full((2,), 1e-14, dtype=D),
    ),
    "softshrink": (lambda x: functional.softshrink(x, 0.0).sum(), torch.zeros(2, dtype=D)),
    "hardshrink": (lambda x: functional.hardshrink(x, 0.0).sum(), torch.zeros(2, dtype=D)),
    "pow": (lambda x: (x ** (x - 1)).sum(), torch.ones(2, dtype=D)),
}


@pytest.mark.parametrize("name", EDGES)
def test_an_eager_call_that_looks_at_the_graph_refuses(device: torch.device, name: str) -> None:
    fn, point = EDGES[name]
    leaf = point.to(device).requires_grad_()
    with pytest.raises(gradkit.UnsupportedGraphError, match=SEEN):
        gradkit.value_and_grads(fn(leaf), leaf, create_graph=True)
    right = func.value_and_grads(fn)(point.to(device))[1]  # what the message advises
    with gradkit.checked():
        grads = gradkit.value_and_grads(fn(leaf), leaf, create_graph=True)[1]
    torch.testing.assert_close(grads, right)
    away = (point.to(device) / 2 + 0.3).requires_grad_()
    gradkit.value_and_grads(fn(away), away, create_graph=True)


def test_a_constant_exponent_of_zero_is_not_refused(device: torch.device) -> None:
    x = torch.ones(3, dtype=D, device=device, requires_grad=True)
    loss = (x ** torch.arange(3.0, dtype=D, device=device)).sum()
    _, grads = gradkit.value_and_grads(loss, x, create_graph=True)
    assert grads.tolist() == [0, 1, 2]


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: x.T ** (x.T * 0),
    "float_power": lambda x: torch.float_power(x.T, x.T * 0),
    "polar": lambda x: torch.polar(x.T * 0, x.T),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(
        (x.T * 0 + 1e-14), x.T.clamp(0, 1), reduction="none"
    ),
    "softshrink": lambda x: functional.softshrink(x.T, 0.0),
    "hardshrink": lambda x: functional.hardshrink(x.T, 0.0),
    "cosine_similarity": lambda x: functional.cosine_similarity(x.T / 9, x.T[:1], 1, 0.5),
    "gaussian_nll_loss": lambda x: functional.gaussian_nll_loss(
        x, x + 1, 0.01 * x.abs(), eps=0.5, reduction="none"
    ),
    "vander": lambda x: torch.linalg.vander(x.T),
    "block_diag": lambda x: torch.block_diag(x[0, :0], x),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_the_value_has_the_bits_and_the_strides_of_the_operation(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    x = (random(3, 4).abs() + 0.5).to(device, dtype)
    expected = VALUES[name](x)

    def loss(x: Tensor) -> Tensor:
        result = VALUES[name](x)
        assert torch.equal(result.detach(), expected)
        assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)
        return torch.view_as_real(result).sum() if result.is_complex() else result.sum()

    leaf = x.clone().requires_grad_()
    with gradkit.checked():
        loss(leaf)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", others_slow([name for name in VALUES if name != "gaussian_nll_loss"], ["vander", "pow"])
)
def test_they_are_compiled_in_one_graph(device: torch.device, name: str) -> None:
    x = (random(3, 4).abs() + 0.5).to(device)

    def slope(x: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            result = VALUES[name](x)
            return torch.view_as_real(result).sum() if result.is_complex() else result.sum()

        return func.value_and_grads(loss)(x)[1]

    torch.compiler.reset()  # which compiles the code of one function eight times at most
    compiled = torch.compile(slope, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), slope(x))


def test_each_has_a_formula(device: torch.device) -> None:
    assert VALUES.keys() <= FORMULAS.keys()
