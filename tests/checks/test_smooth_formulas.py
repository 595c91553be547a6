"""The formulas are right in every derivative where torch's rules branch: the oracle is written out.

Singular matrices of every rank, equal singular values, zeros, ties, entries far apart; by every
way of gradkit.func, and by eager code inside `checked()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor

import gradkit
from gradkit import func
from gradkit._torch_bugs import formulas
from gradkit._torch_bugs.table import FORMULAS
from tests.helpers import others_slow

D = torch.float64
Scalar = Callable[[Tensor], Tensor]
Way = Callable[[Scalar, Tensor, list[Tensor]], Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce"),  # is in beta
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # under vmap
]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# --- the ways to a derivative along directions


def slope(fn: Scalar, along: Tensor) -> Scalar:
    return lambda x: (func.value_and_grads(fn)(x)[1] * along).sum()


def forward(fn: Scalar, along: Tensor) -> Scalar:
    return lambda x: func.jvp(fn, (x,), (along,))[1]


def mixed(kinds: str, fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    for kind, one in zip(reversed(kinds), along, strict=False):
        fn = (slope if kind == "R" else forward)(fn, one)
    return fn(x)


def product(mode: str, fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    return (func.hvp(fn, x, along[0], mode=mode)[1] * along[1]).sum()


def by_samples(fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    batch = torch.stack([x + 0.5, x])
    return (func.per_sample_grads(fn, in_dims=0)(batch)[1] * along[0]).sum()


def products_of_samples(fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    of_sample = torch.vmap(lambda x: func.hvp(fn, x, along[0])[1])
    return (of_sample(torch.stack([x + 0.5, x]))[1] * along[1]).sum()


def linearized(fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    result: Tensor = func.linearize(fn, x)[1](along[0])
    return result


def without_graph(fn: Scalar, x: Tensor, along: list[Tensor]) -> Tensor:
    return (func.value_and_grads(fn, create_graph=False)(x)[1] * along[0]).sum()


def checked(fn: Scalar, x: Tensor, along: list[Tensor], order: int) -> Tensor:
    leaf = x.clone().requires_grad_()
    with gradkit.checked():
        value = fn(leaf)
        for one in along[:order]:
            grads = gradkit.value_and_grads(value, leaf, create_graph=True, unused="zeros")[1]
            value = (grads * one).sum()
    return value.detach()


WAYS: dict[str, tuple[int, Way]] = {
    **{
        kinds: (len(kinds), partial(mixed, kinds)) for kinds in ("R", "F", "RF", "FF", "RRR", "FFR")
    },
    "without graph": (1, without_graph),
    "per_sample_grads": (1, by_samples),
    "linearize": (1, linearized),
    "checked": (1, partial(checked, order=1)),
    "forward over reverse": (2, partial(product, "forward-over-reverse")),
    "reverse over reverse": (2, partial(product, "reverse-over-reverse")),
    "vmapped hvp": (2, products_of_samples),
}
CHECKED_TWICE: dict[str, tuple[int, Way]] = {
    **WAYS,
    "checked, twice": (2, partial(checked, order=2)),
}


def assert_derivatives(
    fn: Scalar, written: Scalar, x: Tensor, ways: dict[str, tuple[int, Way]] = CHECKED_TWICE
) -> None:
    along = [random(*x.shape, seed=seed).to(x) for seed in (1, 2, 3)]
    right: dict[int, Tensor] = {}
    of_order = written
    for order in (1, 2, 3):
        of_order = partial(_slope_by_torch, of_order, along[order - 1])
        right[order] = of_order(x)
    for name, (order, way) in ways.items():
        got = way(fn, x, along).detach()
        # The derivative of torch's det by the cotangent solves with the matrix: 1e-16 times the
        # condition number, which is 7e8 for one of the matrices.
        rtol = 1e-8 if name == "linearize" else 1e-9
        text = f"{name}: {got}, not {right[order]}"
        torch.testing.assert_close(got, right[order], rtol=rtol, atol=1e-9, msg=text)


def _slope_by_torch(fn: Scalar, along: Tensor, x: Tensor) -> Tensor:
    return (torch.func.grad(fn)(x) * along).sum()


# --- det


def by_permutations(matrix: Tensor) -> Tensor:
    orders = list(permutations(range(len(matrix))))
    swaps = [sum(a > b for i, a in enumerate(order) for b in order[i + 1 :]) for order in orders]
    product = matrix.new_tensor([(-1) ** count for count in swaps])
    for row, columns in zip(matrix, zip(*orders, strict=True), strict=True):
        product = product * row[list(columns)]
    return product.sum()


def matrices(size: int) -> Iterator[Tensor]:
    """Yield matrices of every rank, with singular values apart, equal, and of a permutation."""
    for rank in range(size + 1):
        u, v = (torch.linalg.qr(random(size, size, seed=seed + rank))[0] for seed in (5, 50))
        kept = (torch.arange(size) < rank).to(D)
        yield u * (kept * torch.linspace(0.5, 2, size, dtype=D)) @ v.mT
        yield u * kept @ v.mT
        yield torch.diag(kept).roll(1, 0)
    yield random(size, size, seed=7) * torch.logspace(-4, 4, size, dtype=D)


@pytest.mark.parametrize("size", others_slow(range(1, 5), [1, 4]))
def test_det_of_every_rank(device: torch.device, size: int) -> None:
    for matrix in matrices(size):
        assert_derivatives(torch.linalg.det, by_permutations, matrix.to(device))


@pytest.mark.long
@pytest.mark.parametrize("size", [5, 6])
def test_det_where_rows_are_eliminated(device: torch.device, size: int) -> None:
    ways = {name: WAYS[name] for name in ("R", "F", "RF", "reverse over reverse", "RRR")}
    for matrix in matrices(size):
        assert_derivatives(torch.det, by_permutations, matrix.to(device), ways)


def of_parts(det: Callable[[Tensor], Tensor], parts: Tensor) -> Tensor:
    value = det(torch.complex(*parts))
    return value.real + 2 * value.imag


@pytest.mark.parametrize("size", others_slow(range(1, 4), [1, 3]))
def test_det_of_complex_matrices(device: torch.device, size: int) -> None:
    for matrix in matrices(size):
        unitary = torch.linalg.qr(torch.complex(random(size, size, seed=8), matrix))[0]
        turned = torch.view_as_real(matrix.to(torch.complex128) @ unitary).movedim(-1, 0)
        fn, written = (partial(of_parts, det) for det in (torch.linalg.det, by_permutations))
        assert_derivatives(fn, written, turned.to(device))


def test_det_of_a_batch_of_which_some_are_singular(device: torch.device) -> None:
    batch = torch.stack(list(matrices(3))[:-1]).to(device)
    weights = random(len(batch)).to(device)

    def written(x: Tensor) -> Tensor:
        return (torch.stack(list(map(by_permutations, x))) * weights).sum()

    assert_derivatives(lambda x: (x.det() * weights).sum(), written, batch)


@pytest.mark.parametrize("scale", [1e-110, 1e110])
def test_det_that_under_or_overflows(device: torch.device, scale: float) -> None:
    x = scale * torch.eye(3, dtype=D, device=device)
    x[0, 0] = 1
    _, grads = func.value_and_grads(lambda x: torch.linalg.det(x[1:, 1:]) * scale**-2)(x)
    torch.testing.assert_close(grads[2, 2], torch.tensor(1 / scale, dtype=D, device=device))
    tiny = 1e-200 * torch.eye(2, dtype=D, device=device)
    assert torch.equal(func.value_and_grads(torch.det)(tiny)[1], tiny)


def test_det_of_an_empty_matrix_and_of_what_is_not_finite(device: torch.device) -> None:
    empty = torch.ones(0, 0, dtype=D, device=device)
    value, grads = func.value_and_grads(lambda x: torch.linalg.det(x) + x.sum())(empty)
    assert value == 1
    assert grads.shape == (0, 0)
    nan = torch.full((2, 2), torch.nan, dtype=D, device=device)
    value, grads = func.value_and_grads(torch.linalg.det)(nan)
    assert value.isnan()
    assert grads.isnan().all()


def test_det_keeps_the_bits_of_torch_where_that_is_right(device: torch.device) -> None:
    matrix = random(5, 5).to(device)
    value, grads = func.value_and_grads(lambda x: 3 * torch.linalg.det(x))(matrix)
    leaf = matrix.clone().requires_grad_()
    expected = 3 * torch.linalg.det(leaf)
    expected.backward()
    assert torch.equal(value, expected)
    if device.type == "cpu":  # where the host sees that no matrix is singular
        assert torch.equal(grads, leaf.grad)
    torch.testing.assert_close(grads, leaf.grad)


def test_the_fifth_derivative_of_det_is_refused_beyond_four_rows(device: torch.device) -> None:
    def fifth(size: int, slope: Callable[[Scalar, Tensor], Scalar] = slope) -> Tensor:
        fn: Scalar = torch.linalg.det
        for seed in range(5):
            fn = slope(fn, random(size, size, seed=seed).to(device))
        return fn(torch.eye(size, dtype=D, device=device).requires_grad_())

    def eagerly(fn: Scalar, along: Tensor) -> Scalar:
        return lambda x: (gradkit.value_and_grads(fn(x), x, create_graph=True)[1] * along).sum()

    assert fifth(2) == 0
    with pytest.raises(gradkit.UnsupportedGraphError, match="fourth derivative of det"):
        fifth(5)
    # The fifth derivative of det is linear in each row, so it is a sum over permutations of rows.
    rows = [random(5, 5, seed=seed).to(device) for seed in range(5)]
    right = sum(
        torch.stack([rows[k][i] for i, k in enumerate(order)]).det()
        for order in permutations(range(5))
    )
    torch.testing.assert_close(fifth(5, eagerly), torch.as_tensor(right))


# --- products


def zeros_at(size: int, *zeros: int) -> Tensor:
    return random(size).index_fill(0, torch.tensor(zeros, dtype=torch.long), 0)


POINTS = [zeros_at(5), zeros_at(5, 1), zeros_at(5, 0, 3), zeros_at(4, 0, 1, 2), zeros_at(1, 0)]
at_zeros = pytest.mark.parametrize("x", POINTS, ids=lambda x: f"{int((x == 0).sum())} of {len(x)}")


def product_of(x: Tensor) -> Tensor:
    value = x[0]
    for one in x[1:]:
        value = value * one
    return value


@at_zeros
def test_prod(device: torch.device, x: Tensor) -> None:
    def with_square(fn: Scalar) -> Scalar:  # one element has no second derivative else
        return lambda x: fn(x) + fn(x).square()

    for fn in (torch.prod, lambda x: x.prod(0, keepdim=True).sum()):
        assert_derivatives(with_square(fn), with_square(product_of), x.to(device))


@at_zeros
def test_cumprod(device: torch.device, x: Tensor) -> None:
    def written(x: Tensor) -> Tensor:
        return torch.stack([product_of(x[: i + 1]) * (i + 1) for i in range(len(x))]).sum()

    weights = torch.arange(1.0, len(x) + 1, dtype=D, device=device)
    assert_derivatives(lambda x: (x.cumprod(0) * weights).sum(), written, x.to(device))


SEGMENTS = torch.tensor([2, 0, 2, 2, 0])


def reduced(name: str, reduce: str, include_self: bool, x: Tensor) -> Tensor:
    """Four values, of which one is hit by nothing and one by one of five sources."""
    given, index = x[:4] * 1, SEGMENTS[: len(x) - 4].to(x.device)
    return getattr(given, name)(0, index, x[4:], reduce, include_self=include_self)


def reduced_by_hand(reduce: str, include_self: bool, x: Tensor) -> Tensor:
    results = []
    for place, own in enumerate(x[:4]):
        several = [s for i, s in zip(SEGMENTS, x[4:], strict=False) if i == place]
        if include_self or not several:
            several.append(own)
        together = torch.stack(several)
        by = {"prod": product_of, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin}
        results.append(by[reduce](together))
    return torch.stack(results)


def squares(reduce: Scalar, x: Tensor) -> Tensor:
    weights = torch.arange(1.0, 5, dtype=x.dtype, device=x.device)
    result = reduce(x)
    return (weights * (result + result.square())).sum()


IN_PLACE = {name: CHECKED_TWICE[name] for name in ("R", "F", "RF", "checked", "per_sample_grads")}


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("name", ["scatter_reduce", "index_reduce"])
@pytest.mark.parametrize("suffix", ["", "_"])
def test_reductions(
    device: torch.device, name: str, reduce: str, include_self: bool, suffix: str
) -> None:
    fn = partial(reduced, name + suffix, reduce, include_self)
    written = partial(reduced_by_hand, reduce, include_self)
    for zeros in ((), (0, 4), (4, 6)) if suffix else ((), (4,), (0, 4), (4, 6), (4, 6, 7, 8)):
        x = zeros_at(9, *zeros).to(device)
        if not include_self:  # what is not included equals the result
            x[2] = written(x)[2]
        ways = IN_PLACE if suffix else CHECKED_TWICE
        assert_derivatives(partial(squares, fn), partial(squares, written), x, ways)


def test_reductions_of_more_dimensions_and_of_none(device: torch.device) -> None:
    x, src = random(4, 3).to(device), random(2, 3, seed=1).to(device)
    x[0, 0] = src[1, 1] = src[0, 1] = 0
    index = torch.tensor([[0, 3, 0], [0, 3, 1]], device=device)
    for dim in (0, 1, -1):
        here = index.clamp(max=2) if dim else index

        def loss(s: Tensor, dim: int = dim, here: Tensor = here) -> Tensor:
            return x.scatter_reduce(dim, here, s, "prod").square().sum()

        def written(s: Tensor, dim: int = dim, here: Tensor = here) -> Tensor:
            out = {(i, j): x[i, j] for i in range(4) for j in range(3)}
            for i in range(2):
                for j in range(3):
                    k = int(here[i, j])
                    place = (i, k) if dim else (k, j)
                    out[place] = out[place] * s[i, j]
            return torch.stack(list(out.values())).square().sum()

        assert_derivatives(loss, written, src)
    zero = torch.zeros((), dtype=torch.long, device=device)
    assert_derivatives(
        lambda s: s.new_ones(()).scatter_reduce(0, zero, s, "prod"), lambda s: s * 1, src[0, 0]
    )
    none = index[:0]
    value, grads = func.value_and_grads(lambda x: x.scatter_reduce(0, none, src, "prod").sum())(x)
    assert value == x.sum()
    assert torch.equal(grads, torch.ones_like(x))


# --- sinc, logcumsumexp, weight_norm


def sinc_by_terms(x: Tensor) -> Tensor:
    square, term = (torch.pi * x).square(), torch.ones_like(x)
    total = term
    for n in range(2, 44, 2):
        term = -term * square / (n * (n + 1))
        total = total + term
    return total


@pytest.mark.parametrize("sinc", [torch.sinc, Tensor.sinc, torch.special.sinc])
def test_sinc_at_and_near_zero(device: torch.device, sinc: Callable[[Tensor], Tensor]) -> None:
    near = [0.0, 1e-12, -1e-9, 1e-7, -1e-5, 1e-3, 0.1, 0.2499, 0.25, 0.2501, -0.5, 1.0, 1.5]
    weights = random(len(near), seed=9).to(device)

    def weighted(fn: Scalar) -> Scalar:
        return lambda x: (fn(x) * weights).sum()

    point = torch.tensor(near, dtype=D, device=device)
    assert_derivatives(weighted(sinc), weighted(sinc_by_terms), point)
    zero = torch.zeros((), dtype=D, device=device)
    product = func.hvp(torch.sinc, zero, torch.ones_like(zero))[1]
    torch.testing.assert_close(product, -(torch.pi**2) / 3 * torch.ones_like(zero))
    fourth: Scalar = torch.sinc
    for _ in range(4):
        fourth = slope(fourth, torch.ones_like(zero))
    torch.testing.assert_close(fourth(zero), torch.pi**4 / 5 * torch.ones_like(zero))


def bessel_by_terms(x: Tensor, order: int) -> Tensor:
    term = (x / 2) ** order
    total = term
    for n in range(1, 60):
        term = term * (x / 2).square() / (n * (n + order))
        total = total + term
    return total


@pytest.mark.parametrize("order", [0, 1])
def test_bessel_at_and_near_zero(device: torch.device, order: int) -> None:
    bessel = getattr(torch.special, f"i{order}")
    near = [0.0, 1e-12, -1e-9, 1e-7, -1e-5, 1e-3, 0.1, 0.2499, 0.25, 0.2501, -0.5, 1.0, 1.5]
    weights = random(len(near), seed=9).to(device)

    def weighted(fn: Scalar) -> Scalar:
        return lambda x: (fn(x) * weights).sum()

    point = torch.tensor(near, dtype=D, device=device)
    by_terms = weighted(lambda x: bessel_by_terms(x, order))
    assert_derivatives(weighted(bessel), by_terms, point)
    one = torch.ones((), dtype=D, device=device)
    fn: Scalar = bessel
    for _ in range(4 - order):
        fn = slope(fn, one)
    torch.testing.assert_close(fn(torch.zeros_like(one)), 0.375 * one)


def test_i0_in_place(device: torch.device) -> None:
    def loss(x: Tensor) -> Tensor:
        return (x * 1).i0_().square().sum()

    def written(x: Tensor) -> Tensor:
        return bessel_by_terms(x, 0).square().sum()

    assert_derivatives(loss, written, torch.tensor([0.0, 1e-6, 0.5], dtype=D, device=device))


def test_sinc_in_place_and_of_a_view(device: torch.device) -> None:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        y.T[0].sinc_()
        return (y * y).sum()

    def written(x: Tensor) -> Tensor:
        return torch.cat([sinc_by_terms(x[:, :1]), x[:, 1:]], 1).square().sum()

    assert_derivatives(loss, written, torch.tensor([[0.0, 2.0], [1e-6, 0.5]], dtype=D).to(device))


def test_forward_mode_of_logcumsumexp_does_not_underflow(device: torch.device) -> None:
    for dtype, scale in ((D, 500.0), (torch.float32, 40.0)):
        x = torch.tensor([0.0, 1.0, 2.0, -5.0], device=device, dtype=dtype) * scale
        along = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device, dtype=dtype)
        _, products = func.jvp(lambda x: x.logcumsumexp(0), (x,), (along,))
        assert products.tolist() == [1, 2, 3, 3]
    x = random(3, 4).to(device)
    torch.testing.assert_close(
        func.jvp(lambda x: x.logcumsumexp(1), (x,), (x,))[1],
        torch.func.jvp(lambda x: x.exp().cumsum(1).log(), (x,), (x,))[1],
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_forward_mode_of_weight_norm(device: torch.device, dim: int) -> None:
    v = random(3, 4).to(device)
    g = torch.norm_except_dim(v, 2, dim) + 1

    def loss(v: Tensor) -> Tensor:
        return torch._weight_norm(v, g, dim).sin().sum()

    along = random(3, 4, seed=1).to(device)
    right = (torch.func.grad(loss)(v) * along).sum()
    torch.testing.assert_close(func.jvp(loss, (v,), (along,))[1], right)


# --- what they stand for, and what they cost


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "det": lambda x: torch.linalg.det(x[..., :3]),
    "prod": lambda x: torch.prod(x),
    "prod, dim": lambda x: torch.prod(x, 1, dtype=D),
    "prod, keepdim": lambda x: torch.prod(x, dim=0, keepdim=True),
    "cumprod": lambda x: x.T.cumprod(dim=0),
    "sinc": lambda x: x.T.sinc(),
    "i0": lambda x: x.T.i0(),
    "i1": lambda x: torch.special.i1(x.T),
    "scatter_reduce": lambda x: x.T.scatter_reduce(
        0, torch.tensor([[0, 3], [0, 2]]), x[:2, :2], "prod"
    ),
    "amax": lambda x: x.scatter_reduce(
        1, torch.tensor([[0, 1]]), x[:1, :2], reduce="amax", include_self=False
    ),
    "index_reduce": lambda x: x.index_reduce(1, torch.tensor([0, 2]), x[:, :2], "prod"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_the_value_has_the_bits_and_the_strides_of_the_operation(
    device: torch.device, name: str
) -> None:
    x = random(3, 4)
    for dtype in (D, torch.float32):
        expected = VALUES[name](x.to(dtype))

        def loss(x: Tensor, expected: Tensor = expected) -> tuple[Tensor, Tensor]:
            result = VALUES[name](x)
            assert result.stride() == expected.stride()
            return result.sum(), result

        (_, got), _ = func.value_and_grads(loss, has_aux=True)(x.to(dtype))
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype
        func.hvp(lambda x: loss(x)[0], x.to(dtype), x.to(dtype))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", others_slow([name for name in VALUES if "index" not in name], ["det", "prod, dim"])
)
def test_they_are_compiled_in_one_graph(device: torch.device, name: str) -> None:
    torch._dynamo.reset()  # it compiles one code object no more than eight times
    x = random(3, 4).index_fill(1, torch.tensor([1]), 0)

    def product(x: Tensor) -> Tensor:
        result: Tensor = func.hvp(lambda x: VALUES[name](x).square().sum(), x, x)[1]
        return result

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), product(x))


def test_each_is_reached_by_its_name(device: torch.device) -> None:
    names = ("det", "prod", "cumprod", "scatter_reduce", "index_reduce")
    assert all(FORMULAS[name] is getattr(formulas, name) for name in names)
    for name in ("sinc", "i0", "i1"):
        formula = FORMULAS[name]
        assert isinstance(formula, partial)
        assert formula.func is formulas.near_zero
