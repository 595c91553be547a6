"""Operations of which torch loses a part of the derivative: differences are the oracle."""

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
from tests.checks.test_smooth_formulas import WAYS, D, assert_derivatives, random

Scalar = Callable[[Tensor], Tensor]


def by_differences(fn: Scalar, x: Tensor, along: Tensor, step: float = 1e-6) -> float:
    return ((fn(x + step * along) - fn(x - step * along)) / (2 * step)).item()


def along_ours(fn: Scalar, x: Tensor, along: Tensor) -> list[float]:
    """Return the derivative by func, by a jvp, and by eager code inside of `checked()`."""
    leaf = x.clone().requires_grad_()
    with gradkit.checked():
        eager = gradkit.value_and_grads(fn(leaf), leaf)[1]
    by_func = func.value_and_grads(fn)(x)[1]
    return [(grad * along).sum().item() for grad in (by_func, eager)]


# --- ties of distances

DISTANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "cdist": lambda x: torch.cdist(x, torch.zeros_like(x), p=torch.inf),
    "pdist": lambda x: torch.pdist(torch.cat([x, torch.zeros_like(x)]), torch.inf),
    "functional.pdist": lambda x: functional.pdist(torch.cat([x, torch.zeros_like(x)]), torch.inf),
    "dist": lambda x: torch.dist(x, torch.zeros_like(x), torch.inf),
    "pairwise": lambda x: functional.pairwise_distance(x, torch.zeros_like(x), torch.inf, 0.0),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_ties_share_the_gradient(device: torch.device, name: str) -> None:
    x = torch.tensor([[2.0, -2.0, 1.0]], dtype=D, device=device)
    tied = torch.tensor([[1.0, -1.0, 0.0]], dtype=D, device=device)

    def distance(x: Tensor) -> Tensor:
        return DISTANCES[name](x).sum()

    got = [*along_ours(distance, x, tied), func.jvp(distance, (x,), (tied,))[1].item()]
    assert got == pytest.approx([by_differences(distance, x, tied)] * 3)
    batch = torch.vmap(lambda x: func.value_and_grads(distance)(x)[1])(torch.stack([x, x]))
    assert (batch[1] * tied).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["cdist", "pdist"])
def test_ties_are_refused_where_the_graph_is_looked_at(device: torch.device, name: str) -> None:
    x = torch.tensor([[2.0, 2.0, 1.0]], device=device, requires_grad=True)
    losses = [DISTANCES[name](x).sum() for _ in range(2)]
    with pytest.raises(gradkit.UnsupportedGraphError, match="a largest distance of several"):
        gradkit.per_loss_grads(losses, x)
    x = torch.tensor([[2.0, 3.0, 1.0]], device=device, requires_grad=True)
    grads = gradkit.per_loss_grads([DISTANCES[name](x).sum() for _ in range(2)], x)
    assert grads[0].tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("p", [0.5, 1.0, 1.5, 2.0, 3.0])
def test_another_norm_in_a_batch_runs_by_its_formula(device: torch.device, p: float) -> None:
    x = random(2, 3).to(device)
    slope = func.value_and_grads(lambda x: torch.cdist(x, x.sin() + 1, p=p).square().sum())
    got = torch.vmap(lambda x: slope(x)[1])(torch.stack([x, 2 * x]))
    torch.testing.assert_close(got, torch.stack([slope(x)[1], slope(2 * x)[1]]))


# --- logarithms of zero

LOGARITHMS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "xlogy": (torch.xlogy, 0.0),
    "special.xlogy": (torch.special.xlogy, 0.0),
    "xlogy_": (lambda x, y: (x * 1).xlogy_(y), 0.0),
    "special.xlog1py": (torch.special.xlog1py, -1.0),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_zero_times_a_logarithm_is_a_constant(device: torch.device, name: str) -> None:
    operation, at = LOGARITHMS[name]
    x = torch.tensor([0.0, 2.0, 0.0], dtype=D, device=device)
    y = torch.tensor([at, at + 4, at + 1], dtype=D, device=device)

    def loss(y: Tensor) -> Tensor:
        return operation(x, y).sum()

    assert func.value_and_grads(loss)(y)[1].tolist() == [0, 0.5, 0]
    assert func.jvp(loss, (y,), (torch.ones_like(y),))[1] == 0.5
    assert func.hvp(loss, y, torch.ones_like(y))[1].tolist() == [0, -0.125, 0]
    if name != "xlogy_":  # which writes a batch on what is none
        batch = torch.vmap(lambda y: func.value_and_grads(loss)(y)[1])(y[None])
        assert batch.tolist() == [[0, 0.5, 0]]
    leaf = y.clone().requires_grad_()
    with gradkit.checked():
        assert gradkit.value_and_grads(loss(leaf), leaf)[1].tolist() == [0, 0.5, 0]
    leaf = y.clone().requires_grad_()
    with pytest.raises(gradkit.UnsupportedGraphError, match="nan for a derivative of zero"):
        gradkit.per_loss_grads([loss(leaf) for _ in range(2)], leaf)
    grads = gradkit.per_loss_grads([operation(leaf, y).sum() for _ in range(2)], leaf)
    assert len(grads) == 2


# --- ctc_loss

REDUCTIONS = [("none", 0), ("mean", 1), ("sum", 2)]


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda pair: pair[0])
def test_ctc_loss_by_log_probs(
    device: torch.device, reduction: tuple[str, int], dtype: torch.dtype, zero_infinity: bool
) -> None:
    targets = torch.tensor([[1, 2], [1, 1], [3, 3]], dtype=dtype, device=device)
    # The last needs three steps, and has two.
    steps = torch.tensor([5, 4, 2 if zero_infinity else 3], dtype=dtype, device=device)
    given = targets, steps, torch.tensor([2, 1, 2], dtype=dtype, device=device)
    name, number = reduction
    along = random(5, 3, 4, seed=1).to(device)

    def loss(log_probs: Tensor) -> Tensor:
        options = {"reduction": name, "zero_infinity": zero_infinity}
        return functional.ctc_loss(log_probs, *given, **options).sum()

    def by_operator(log_probs: Tensor) -> Tensor:
        return torch.ctc_loss(log_probs, *given, 0, number, zero_infinity).sum()

    for log_probs in (random(5, 3, 4).to(device), random(5, 3, 4).log_softmax(-1).to(device)):
        right = by_differences(loss, log_probs, along)
        got = [*along_ours(loss, log_probs, along), *along_ours(by_operator, log_probs, along)]
        assert got == pytest.approx([right] * 4, rel=1e-6, abs=1e-7)


def test_ctc_loss_behind_log_softmax_is_as_before(device: torch.device) -> None:
    x = random(5, 2, 4).to(device)
    criterion, length = torch.nn.CTCLoss(), torch.tensor([5, 5], device=device)
    targets = torch.tensor([[1, 2], [3, 1]], device=device)

    def loss(x: Tensor) -> Tensor:
        return criterion(x.log_softmax(-1), targets, length, length - 3)

    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(func.value_and_grads(loss)(x)[1], right)
    each = gradkit.per_loss_grads([loss(leaf), loss(leaf)], leaf)  # which looks at the graph
    assert each[0].equal(right)
    transposed = leaf.transpose(0, 1).log_softmax(-1).transpose(0, 1)
    losses = [criterion(transposed, targets, length, length - 3) for _ in range(2)]
    assert gradkit.per_loss_grads(losses, leaf)[0].isfinite().all()
    steps = leaf[0].log_softmax(-1)[None].expand(5, -1, -1)  # the same for each step
    losses = [criterion(steps, targets, length, length - 3) for _ in range(2)]
    along = 1e-6 * random(5, 2, 4, seed=1).to(device)
    with torch.no_grad():
        ends = [
            x[0].add(sign * along[0]).log_softmax(-1)[None].expand(5, -1, -1) for sign in (1, -1)
        ]
        slopes = [criterion(end, targets, length, length - 3) for end in ends]
    (ours, _) = gradkit.per_loss_grads(losses, leaf)
    torch.testing.assert_close((ours * along).sum(), (slopes[0] - slopes[1]) / 2)
    losses = [criterion(leaf * 1, targets, length, length - 3) for _ in range(2)]
    with pytest.raises(gradkit.UnsupportedGraphError, match="no log_softmax has made"):
        gradkit.per_loss_grads(losses, leaf)


def test_ctc_loss_of_one_sequence(device: torch.device) -> None:
    x, along = (random(5, 4, seed=seed).to(device) for seed in (0, 1))
    given = (torch.tensor(n, device=device) for n in ([1, 2], 5, 2))
    loss: Scalar = partial(lambda *xs: functional.ctc_loss(xs[3], *xs[:3]), *given)
    assert along_ours(loss, x, along) == pytest.approx([by_differences(loss, x, along)] * 2)


# --- singular vectors that have no singular value


def beyond(a: Tensor) -> Tensor:
    return torch.linalg.svd(a).U[:, 2:]


SPACES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns of U": beyond,
    "rows of Vh": lambda a: torch.linalg.svd(a.mT, full_matrices=True).Vh[2:].mT,
    "torch.svd": lambda a: torch.svd(a, some=False).U[:, 2:],
    "Tensor.svd": lambda a: a.mT.svd(some=False).V[:, 2:],
}


@pytest.mark.parametrize("name", SPACES)
def test_the_space_that_a_matrix_does_not_reach(device: torch.device, name: str) -> None:
    y = random(5, seed=9).to(device)

    def distance(a: Tensor) -> Tensor:
        return (SPACES[name](a).mT @ y).square().sum().sin()

    def written(a: Tensor) -> Tensor:
        return (y - a @ torch.linalg.solve(a.mT @ a, a.mT @ y)).square().sum().sin()

    ways = {name: way for name, way in WAYS.items() if "sample" not in name and "vmap" not in name}
    assert_derivatives(distance, written, random(5, 2).to(device), ways)


def test_the_space_of_a_complex_matrix(device: torch.device) -> None:
    a, y = (torch.complex(*random(2, 4, 2, seed=seed)).to(device) for seed in (0, 1))
    x, along = torch.tensor([1.0, 0.3], dtype=D, device=device), torch.ones(2, dtype=D).to(device)

    def distance(x: Tensor) -> Tensor:
        return (beyond(a * x[0] + x[1]).mH @ y).abs().square().sum()

    assert along_ours(distance, x, along) == pytest.approx([by_differences(distance, x, along)] * 2)


def test_a_loss_of_the_basis_is_refused(device: torch.device) -> None:
    a = random(5, 2).to(device)
    grads = func.value_and_grads(lambda a: beyond(a)[:, 0].sum())
    for call, given in ((grads, a), (torch.func.vmap(grads), a.expand(3, 5, 2))):
        with pytest.raises(gradkit.UnsupportedGraphError, match="one that depends on its basis"):
            call(given)
    leaf = a.clone().requires_grad_()
    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="its basis"):
        gradkit.value_and_grads(beyond(leaf)[:, 0].sum(), leaf)


# --- the derivative of a jvp of eigh


def of_vectors(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((a + a.mT) / 2)
    return ((vectors * values.sin()) @ vectors.mT)[0, 1]


def written_vectors(a: Tensor) -> Tensor:
    """The sine of a matrix, by its series."""
    a = (a + a.mT) / 2
    term, total = a, a
    for n in range(1, 25):
        term = -term @ a @ a / (2 * n * (2 * n + 1))
        total = total + term
    return total[0, 1]


def test_every_derivative_of_eigh(device: torch.device) -> None:
    point = random(3, 3).to(device) + torch.arange(3.0, dtype=D, device=device).diag()
    ways = {name: way for name, way in WAYS.items() if "sample" not in name}
    assert_derivatives(of_vectors, written_vectors, point, ways)
    directions = random(3, 3, seed=1).to(device), random(3, 3, seed=2).to(device)

    def along(x: Tensor) -> Tensor:
        return func.jvp(of_vectors, (x,), directions[:1])[1]

    right = torch.func.hessian(written_vectors)(point)
    right = torch.einsum("ijkl,ij,kl", right, *directions)
    batch = torch.vmap(lambda x: func.value_and_grads(along)(x)[1])(torch.stack([point, point]))
    leaf = point.clone().requires_grad_()
    eager = torch.autograd.grad(along(leaf), leaf)[0]
    for grad in (batch[1], eager):
        torch.testing.assert_close((grad * directions[1]).sum(), right)


def test_the_derivative_of_a_jvp_of_eig_is_refused(device: torch.device) -> None:
    a = random(3, 3).to(device)

    def fn(a: Tensor) -> Tensor:
        values, vectors = torch.linalg.eig(a)
        return ((vectors * values.sin()) @ torch.linalg.inv(vectors)).real[0, 1]

    with pytest.raises(gradkit.UnsupportedGraphError, match="eig: the derivative of its jvp"):
        func.value_and_grads(lambda x: func.jvp(fn, (x,), (a,))[1])(a)


# --- products

INDEXED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_reduce": lambda x, i, y: x.index_reduce(0, i, y, "prod"),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i, y, "prod"),
    "scatter_reduce_": lambda x, i, y: (x * 1).scatter_reduce_(0, i, y, "prod"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")  # is in beta
@pytest.mark.parametrize("name", INDEXED)
def test_a_finite_product_of_huge_factors(device: torch.device, name: str) -> None:
    x = torch.tensor([1e-30, 3.0], device=device)
    factors = torch.tensor([1e8, 1e8, 1e8, 1e8, 1e-8], device=device)
    index = torch.zeros(5, dtype=torch.int64, device=device)

    def total(x: Tensor) -> Tensor:
        return INDEXED[name](x, index, factors)

    right = total(x)
    assert func.jvp(total, (x,), (torch.ones_like(x),))[0].equal(right)
    assert func.value_and_grads(lambda x: total(x)[0])(x)[0] == right[0]
    products = func.jvp(total, (x,), (x,))[1]
    torch.testing.assert_close(products, right)
    grad = func.value_and_grads(lambda x: total(x).sum())(x)[1]
    torch.testing.assert_close(grad, torch.tensor([1e24, 1.0], device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_a_product_that_overflows_in_another_order(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    huge = 1e30 if dtype == torch.float32 else 1e250

    def product(x: Tensor) -> Tensor:
        return x.prod() if name == "prod" else x.cumprod(0)

    for order in ((0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1)):
        x = torch.tensor([(huge, 1 / huge)[i] for i in order], dtype=dtype, device=device)
        value, along = func.jvp(product, (x,), (x,))
        assert value.equal(product(x))
        counts = torch.arange(1, 5, device=device)
        expected = product(x) * (4 if name == "prod" else counts)
        torch.testing.assert_close(along, expected.to(dtype))


# --- norms at zero

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector_norm": torch.linalg.vector_norm,
    "linalg.norm": torch.linalg.norm,
    "Tensor.norm": Tensor.norm,
    "dist": lambda x: torch.dist(x, torch.zeros_like(x)),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x[None]),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_second_derivative_of_a_norm_of_zero(device: torch.device, name: str) -> None:
    zero, along = torch.zeros(2, dtype=D, device=device), torch.ones(2, dtype=D, device=device)
    some = torch.stack([along, zero])
    for smooth in (torch.cos, torch.square, lambda n: torch.special.sinc(n / torch.pi)):
        fn: Any = lambda x, smooth=smooth: smooth(NORMS[name](x))  # noqa: E731
        with pytest.raises(gradkit.UnsupportedGraphError, match="a norm that has a second"):
            func.hvp(fn, zero, along)
        each = torch.func.vmap(lambda x, fn=fn: func.hvp(fn, x, along)[1])
        with pytest.raises(gradkit.UnsupportedGraphError, match="a norm that has a second"):
            each(some)
        right = torch.autograd.functional.hvp(fn, along, along)[1]
        torch.testing.assert_close(func.hvp(fn, along, along)[1], right)
        torch.testing.assert_close(each(along[None]), right[None])
        assert func.value_and_grads(fn)(zero)[1].tolist() == [0, 0]  # as torch's
    fn = lambda x: functional.normalize(x, dim=0).sum()  # noqa: E731
    assert func.hvp(fn, zero, along)[1].tolist() == [0, 0]  # linear within its eps


# --- on a device


def test_points_between_scalars_of_a_device(device: torch.device) -> None:
    """Without device=, torch makes them on the CPU."""
    start, end = torch.tensor(1.0, device=device), torch.tensor(2.0, device=device)

    def total(start: Tensor) -> Tensor:
        return torch.linspace(start, end, 5).sum() + torch.logspace(start, end, 5).sum()

    grad = func.value_and_grads(total)(start)[1]
    assert grad.device == start.device
    leaf = start.clone().requires_grad_()
    with gradkit.checked():
        assert gradkit.value_and_grads(total(leaf), leaf)[1].equal(grad)
