"""implicit of roots and fixed points: against unrolled iterations and dense solves."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck

import gradkit
from gradkit import meta
from tests.helpers import World, assert_same_bits, unchanged

D = torch.float64
ITERATIONS = 200


def dense(product: Any, v: Tensor) -> Tensor:
    eye = torch.eye(v.numel(), dtype=v.dtype, device=v.device)
    return torch.linalg.solve(torch.stack([product(row) for row in eye], 1), v)


def contraction(device: torch.device, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """A matrix that is not symmetric, of norm 0.8, and a vector; both require grad."""
    source = torch.Generator().manual_seed(seed)
    a = torch.randn(size, size, generator=source, dtype=D)
    a *= 0.8 / torch.linalg.matrix_norm(a, 2)
    b = torch.randn(size, generator=source, dtype=D)
    return a.to(device).requires_grad_(), b.to(device).requires_grad_()


def layer(z: Tensor, theta: Any) -> Tensor:
    return (theta["a"] @ z + theta["b"]).tanh()


def iterate(z: Tensor, theta: Any) -> Tensor:
    for _ in range(ITERATIONS):
        z = layer(z, theta)
    return z


def residual(z: Tensor, theta: Any) -> Tensor:
    return layer(z, theta) - z


def height(z: Tensor) -> Tensor:
    return (z.sin() * torch.arange(1, z.numel() + 1, device=z.device)).sum()


CONDITIONS: dict[str, dict[str, Any]] = {
    "fixed_point": {"fixed_point": layer},
    "root": {"root": residual},
}
SOLVES: list[Any] = ["auto", "gmres", "neumann", dense]


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("solve", SOLVES)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), size=st.integers(1, 7))
def test_the_gradient_is_that_of_the_unrolled_iteration(
    device: torch.device, solve: Any, condition: str, seed: int, size: int
) -> None:
    if solve == "neumann" and condition == "root":
        return  # of a negative definite Jacobian
    a, b = contraction(device, size, seed)
    theta, start = {"a": a, "b": b}, torch.zeros(size, dtype=D, device=device)
    unrolled = torch.autograd.grad(height(iterate(start, theta)), (a, b))
    find = meta.implicit(iterate, **CONDITIONS[condition], solve=solve, maxiter=400, tol=1e-13)
    world = World(a, b, start)
    z = find(start, theta)
    assert_same_bits([z], [iterate(start, theta)])
    got = torch.autograd.grad(height(z), (a, b))
    torch.testing.assert_close(got, unrolled, rtol=1e-11, atol=1e-12)
    world.assert_unchanged()


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), size=st.integers(1, 6))
def test_a_linear_root_is_a_dense_solve(device: torch.device, seed: int, size: int) -> None:
    source = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=source, dtype=D) + 3 * torch.eye(size, dtype=D)
    matrix = matrix.to(device).requires_grad_()
    b = torch.randn(size, generator=source, dtype=D).to(device).requires_grad_()
    expected = torch.autograd.grad(height(torch.linalg.solve(matrix, b)), (matrix, b))
    find = meta.implicit(
        lambda _, outer: torch.linalg.solve(*outer),
        root=lambda x, outer: outer[0] @ x - outer[1],
        tol=1e-13,
    )
    got = torch.autograd.grad(height(find(torch.zeros_like(b), (matrix, b))), (matrix, b))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_a_fixed_point_is_the_root_of_what_it_moves(device: torch.device) -> None:
    a, b = contraction(device, 5, 0)
    theta, start = {"a": a, "b": b}, torch.zeros(5, dtype=D, device=device)
    grads = [
        torch.autograd.grad(height(meta.implicit(iterate, **condition)(start, theta)), (a, b))
        for condition in ({"fixed_point": layer}, {"root": lambda z, t: z - layer(z, t)})
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_an_explicit_formula_is_a_fixed_point(device: torch.device) -> None:
    """A map that does not depend on params, whose Jacobian is the identity."""
    a = torch.tensor([1.0, 4.0], dtype=D, device=device, requires_grad=True)
    find = meta.implicit(lambda _, a: a.sqrt(), fixed_point=lambda _, a: a.sqrt())
    got = torch.autograd.grad(find(torch.zeros_like(a), a).sum(), a)
    torch.testing.assert_close(got, torch.autograd.grad(a.sqrt().sum(), a))


def test_trees_none_frozen_and_tied_leaves(device: torch.device) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=D, device=device, requires_grad=True)

    shared, frozen = make(2), nn.Parameter(make(3), requires_grad=False)
    params = {"a": shared, "more": [shared, None, frozen, make()]}
    p, q = make(2), make()

    def right(o: Any) -> Any:
        return o["p"].exp(), o["p"].sum() * o["q"]

    def solver(x: Any, o: Any) -> Any:
        assert x["more"][2] is frozen
        first, second = right(o)
        return {**x, "a": first, "more": [first, None, x["more"][2], second]}

    def root(x: Any, o: Any) -> Any:
        one = x["a"].log() - o["p"]
        two = x["more"][3] - x["more"][0].log().sum() * o["q"]
        return {"a": one, "more": [one, None, None, two]}

    outer = {"p": p, "q": q, "none": None, "kind": "root"}
    world = World(shared, p, q)
    got = meta.implicit(solver, root=root, tol=1e-12)(params, outer)
    assert got["a"] is got["more"][0]
    assert got["more"][1] is None
    assert got["more"][2] is frozen
    total = got["a"].sin().sum() + got["more"][3] ** 2
    first, second = right(outer)
    expected = torch.autograd.grad(first.sin().sum() + second**2, (p, q))
    grads = torch.autograd.grad(total, (p, q, shared), allow_unused=True)
    assert grads[2] is None
    torch.testing.assert_close(grads[:2], expected)
    world.assert_unchanged()

    def untied(x: Any, o: Any) -> Any:
        out = root(x, o)
        return {**out, "more": [out["a"] + 1, *out["more"][1:]]}

    with pytest.raises(gradkit.StructureError, match=r"^root\(params, outer\)\['more'\]\[0\]: .*"):
        meta.implicit(solver, root=untied)(params, outer)


def test_the_steady_state_of_an_equation(device: torch.device) -> None:
    """Two species that repress each other; dx/dt = 0, whose Jacobian is not symmetric."""
    rates = torch.tensor([1.3, 0.7, 0.9, 1.1], dtype=D, device=device, requires_grad=True)

    def speed(x: Tensor, k: Tensor) -> Tensor:
        return torch.stack([k[0] / (1 + x[1] ** 2) - k[1] * x[0], k[2] * x[0] - k[3] * x[1]])

    def euler(x: Tensor, k: Tensor) -> Tensor:
        for _ in range(400):
            x = x + 0.2 * speed(x, k)
        return x

    find = meta.implicit(euler, root=speed, tol=1e-13)
    start = torch.ones(2, dtype=D, device=device)
    assert gradcheck(lambda k: find(start, k), rates, atol=1e-7, rtol=1e-7, nondet_tol=1e-12)
    unrolled = torch.autograd.grad(euler(start, rates).prod(), rates)
    got = torch.autograd.grad(find(start, rates).prod(), rates)
    torch.testing.assert_close(got, unrolled, rtol=1e-10, atol=1e-12)


class Sinkhorn:
    """Potentials of entropic transport: one may grow as the other shrinks, and nothing changes."""

    def __init__(self, device: torch.device) -> None:
        self.cost = torch.rand(4, 3, dtype=D, device=device, requires_grad=True)
        self.start = torch.zeros(3, dtype=D, device=device)

    def update(self, g: Tensor, cost: Tensor) -> Tensor:
        return -torch.logsumexp(self.rows(g, cost)[:, None] - cost, 0) - torch.tensor(3.0).log()

    def rows(self, g: Tensor, cost: Tensor) -> Tensor:
        return -torch.logsumexp(g - cost, 1) - torch.tensor(4.0).log()

    def iterate(self, g: Tensor, cost: Tensor) -> Tensor:
        for _ in range(ITERATIONS):
            g = self.update(g, cost)
        return g

    def plan(self, g: Tensor, cost: Tensor) -> Tensor:
        return (self.rows(g, cost)[:, None] + g - cost).exp()


def test_optimal_transport_whose_jacobian_is_singular(device: torch.device) -> None:
    """What does not change along the null space has a gradient; what does has none."""
    s = Sinkhorn(device)
    find = meta.implicit(s.iterate, fixed_point=s.update, tol=1e-10)
    aim = torch.randn(4, 3, dtype=D, device=device)
    unrolled = (s.plan(s.iterate(s.start, s.cost), s.cost) * aim).sum()
    expected = torch.autograd.grad(unrolled, s.cost)
    got = torch.autograd.grad((s.plan(find(s.start, s.cost), s.cost) * aim).sum(), s.cost)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    total = find(s.start, s.cost).sum()
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^fixed_point: .*residual of 1\.00e"):
        torch.autograd.grad(total, s.cost)


def test_a_singular_jacobian_is_an_error_with_its_residual(device: torch.device) -> None:
    a = torch.tensor(2.0, dtype=D, device=device, requires_grad=True)
    double = lambda x, a: (x - a).square()  # noqa: E731 - zero with its derivative
    for name, fn in (("root", double), ("fixed_point", lambda x, a: x + double(x, a))):
        for solve in SOLVES[:3]:
            find = meta.implicit(lambda _, a: a.clone(), **{name: fn}, solve=solve)
            x = find(torch.zeros_like(a), a)
            with unchanged(a), pytest.raises(gradkit.UnsupportedGraphError) as caught:
                x.backward()
            text = str(caught.value)
            assert text.startswith(f"{name}: expected a Jacobian")
            assert re.search(r"residual of (1\.00e\+00|nan)", text)
    flat = meta.implicit(lambda _, a: torch.stack([a, a]), root=lambda x, a: (x - a) * (x - x[0]))
    x = flat(torch.zeros(2, dtype=D, device=device), a)
    with pytest.raises(gradkit.UnsupportedGraphError, match="singular"):
        torch.autograd.grad(x.sum(), a)
    options: Any = {"damping": 1.0, "warn": False}
    find = meta.implicit(lambda _, a: a.clone(), root=double, **options)
    assert torch.autograd.grad(find(torch.zeros_like(a), a), a)[0] == 0


def test_a_solve_that_is_cut_short(device: torch.device) -> None:
    """An error; with warn=False what the terms of the series come to."""
    a, b = contraction(device, 6, 1)
    start = torch.zeros(6, dtype=D, device=device)
    options: Any = {"fixed_point": layer, "solve": "neumann", "maxiter": 3}
    z = meta.implicit(iterate, **options)(start, {"a": a, "b": b})
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"maxiter=1000.*warn=False"):
        torch.autograd.grad(height(z), b)
    z = meta.implicit(iterate, **options, warn=False)(start, {"a": a, "b": b})
    (got,) = torch.autograd.grad(height(z), b)
    at, by = z.detach().requires_grad_(), b.detach().requires_grad_()
    out = layer(at, {"a": a.detach(), "b": by})
    (v,) = torch.autograd.grad(height(at), at)
    term, total = v, torch.zeros_like(v)
    for _ in range(3):
        total = total + term
        (term,) = torch.autograd.grad(out, at, term, retain_graph=True)
    (expected,) = torch.autograd.grad(out, by, total)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_point_that_is_no_root_warns(device: torch.device, condition: str) -> None:
    a, b = contraction(device, 4, 2)
    theta, start = {"a": a, "b": b}, torch.zeros(4, dtype=D, device=device)
    near = meta.implicit(lambda z, t: iterate(z, t) * 1.2, **CONDITIONS[condition])
    z = near(start, theta)
    with pytest.warns(gradkit.GradkitWarning, match=rf"{condition} does not hold at what the sol"):
        torch.autograd.grad(height(z), b, retain_graph=True)
    right = meta.implicit(lambda z, t: iterate(z, t) * (1 + 1e-5), **CONDITIONS[condition])
    unheard = meta.implicit(lambda z, t: z + 1, **CONDITIONS[condition], warn=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for find in (right, unheard):
            torch.autograd.grad(height(find(start, theta)), b)
        (got,) = torch.autograd.grad((find(start, theta) * 0).sum(), b)
    assert not got.any()


def test_a_root_of_zero_does_not_warn(device: torch.device) -> None:
    a = torch.zeros(3, device=device, requires_grad=True)
    for solver in (lambda x, a: a.clone(), lambda x, a: a + 1e-7):
        x = meta.implicit(solver, root=lambda x, a: 1e3 * (x - a))(torch.zeros_like(a), a)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(torch.autograd.grad(x.sum(), a)[0], torch.ones_like(a))


def test_the_callers_solver_may_differentiate_the_product(device: torch.device) -> None:
    """Of a matrix that is not symmetric: normal equations, whose other half is the transpose."""
    a, b = contraction(device, 4, 3)
    theta, start = {"a": a, "b": b}, torch.zeros(4, dtype=D, device=device)
    seen = {}

    def normal(matvec: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        def transposed(u: Tensor) -> Tensor:
            return torch.func.vjp(matvec, torch.zeros_like(u))[1](u)[0]

        seen["jacrev"] = torch.func.jacrev(matvec)(v)
        seen["jacfwd"] = torch.func.jacfwd(matvec)(v)
        at = torch.zeros_like(v).requires_grad_()
        seen["grad"] = torch.autograd.grad(matvec(at), at, v)[0]
        seen["v"] = v
        return gradkit.tree.cg(
            lambda u: transposed(matvec(u)).detach(), transposed(v).detach(), tol=1e-14
        )[0]

    find = meta.implicit(iterate, fixed_point=layer, solve=normal)
    got = torch.autograd.grad(height(find(start, theta)), (a, b))
    expected = torch.autograd.grad(height(iterate(start, theta)), (a, b))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    z = iterate(start, theta).detach()
    matrix = torch.eye(4, dtype=D, device=device)
    matrix = matrix - torch.autograd.functional.jacobian(lambda z: layer(z, theta), z)
    torch.testing.assert_close(seen["jacrev"], matrix.T)
    torch.testing.assert_close(seen["jacfwd"], matrix.T)
    torch.testing.assert_close(seen["grad"], matrix @ seen["v"])


def test_float32_and_a_batch_of_states(device: torch.device) -> None:
    torch.manual_seed(0)
    cell = nn.Linear(8, 8).to(device)
    with torch.no_grad():
        cell.weight *= 0.6 / torch.linalg.matrix_norm(cell.weight, 2)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    call, params, _ = gradkit.func.make_functional(cell)

    def of_batch(z: Tensor, outer: Any) -> Tensor:
        return (call(outer["params"], {}, z)[0] + outer["x"]).tanh()

    def solver(z: Tensor, outer: Any) -> Tensor:
        for _ in range(60):
            z = of_batch(z, outer)
        return z

    start, outer = torch.zeros(16, 8, device=device), {"params": params, "x": x}
    find = meta.implicit(solver, fixed_point=of_batch)
    leaves = [x, *params.values()]
    expected = torch.autograd.grad(solver(start, outer).square().sum(), leaves)
    got = torch.autograd.grad(find(start, outer).square().sum(), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class WritesOnCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(2)


def test_a_backward_that_writes_on_its_cotangent(device: torch.device) -> None:
    """It gets a copy of the solver's vector; a gradient that it spoils for another is refused."""
    a = torch.tensor([2.0, 3.0], dtype=D, device=device, requires_grad=True)
    b = torch.tensor([1.0, 1.0], dtype=D, device=device, requires_grad=True)
    solver: Any = lambda _, o: sum(o) / 2  # noqa: E731
    half: Any = WritesOnCotangent.apply  # of whose argument twice the gradient is given
    find = meta.implicit(solver, root=lambda x, o: half(x) * 2 - o[0] - o[1], solve="gmres")
    x = find(torch.zeros_like(a), (a, b))
    got = torch.autograd.grad(x.sum(), (a, b))
    torch.testing.assert_close(got, (torch.full_like(a, 0.25),) * 2)
    spoils = meta.implicit(solver, root=lambda x, o: 2 * x - (half(o[0]) + o[1]))
    x = spoils(torch.zeros_like(a), (a, b))
    with pytest.raises(gradkit.UnsupportedGraphError, match="in place"):
        torch.autograd.grad(x.sum(), (a, b))


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    a, b = contraction(device, 3, 4)
    find = meta.implicit(iterate, fixed_point=layer)
    z = find(torch.zeros(3, dtype=D, device=device), {"a": a, "b": b})
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"create_graph.*solver's steps"):
        torch.autograd.grad(height(z), b, create_graph=True)


def test_tensors_from_outside_and_unreached_params_are_refused(device: torch.device) -> None:
    outside = torch.ones(2, dtype=D, device=device, requires_grad=True)
    start, a = torch.zeros(2, dtype=D, device=device), torch.ones(2, dtype=D, device=device)
    for name in ("root", "fixed_point"):
        find = meta.implicit(lambda x, a: a, **{name: lambda x, a: x * outside - a})
        with pytest.raises(gradkit.UnsupportedGraphError, match=rf"^{name}: .*"):
            find(start, a)
    with pytest.raises(gradkit.UnreachedParamError, match=r"^root: "):
        meta.implicit(lambda x, a: a, root=lambda x, a: a - 1)(start, a.requires_grad_())


def test_what_a_condition_must_be(device: torch.device) -> None:
    start, a = torch.zeros(2, dtype=D, device=device), torch.ones(2, dtype=D, device=device)
    a.requires_grad_()
    for conditions in ({}, {"root": residual, "fixed_point": layer}):
        with pytest.raises(gradkit.OptionError, match="one of inner_loss, root and fixed_point"):
            meta.implicit(iterate, **conditions)
    with pytest.raises(gradkit.OptionError, match="one of inner_loss, root and fixed_point"):
        meta.implicit(iterate, lambda z, t: z.sum(), root=residual)
    for name in ("root", "fixed_point"):
        with pytest.raises(gradkit.OptionError, match=rf"^{name}: expected a function, got"):
            meta.implicit(iterate, **{name: 3})
        for wrong in (
            lambda x, a: (x - a)[:1],
            lambda x, a: (x - a).sum(),
            lambda x, a: [x - a],
            lambda x, a: None,
            lambda x, a: 1.0,
            lambda x, a: (x - a) * 1j,
        ):
            find = meta.implicit(lambda x, a: a, **{name: wrong})
            with unchanged(start, a), pytest.raises(gradkit.StructureError, match=rf"^{name}\(par"):
                find(start, a)
    with pytest.raises(gradkit.LeafTypeError, match=r"^params: expected real tensors"):
        meta.implicit(lambda x, a: a, root=lambda x, a: x - a)(start * 1j, a)
    assert not meta.implicit(lambda x, a: a, root=lambda x, a: x - a)(
        start, a.detach()
    ).requires_grad
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"outside torch\.func"):
        torch.func.grad(lambda a: meta.implicit(lambda x, a: a, root=residual)(start, a).sum())(a)


@pytest.mark.parametrize("name", ["inner_loss", "root", "fixed_point"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_condition_has_written_is_put_back(
    device: torch.device, name: str, error: type[BaseException]
) -> None:
    norm = nn.BatchNorm1d(3, affine=False, device=device)
    data = torch.randn(6, 3, device=device)

    def condition(x: Tensor, scale: Tensor) -> Tensor:
        norm(data * x.detach())
        nn.functional.dropout(data)
        raise error

    find = meta.implicit(lambda x, _: x, **{name: condition})
    scale = torch.ones((), device=device, requires_grad=True)
    before = torch.get_rng_state(), {k: b.clone() for k, b in norm.named_buffers()}
    with pytest.raises(error):
        find(torch.ones(3, device=device), scale)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(b, before[1][k]) for k, b in norm.named_buffers())
