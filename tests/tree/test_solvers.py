"""cg, gmres and neumann: against dense solves, on trees, at any scale; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradkit
from gradkit import func, tree
from tests.helpers import unchanged

F64 = torch.float64
SOLVERS: dict[str, Any] = {"cg": tree.cg, "gmres": tree.gmres, "neumann": tree.neumann}


def system(device: torch.device, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=source, dtype=F64)
    matrix = root @ root.T / size + torch.eye(size, dtype=F64)
    return matrix.to(device), torch.randn(size, generator=source, dtype=F64).to(device)


@pytest.mark.parametrize("name", SOLVERS)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), size=st.integers(1, 8), damping=st.sampled_from([0.0, 0.3]))
def test_it_is_the_dense_solution(
    device: torch.device, name: str, seed: int, size: int, damping: float
) -> None:
    matrix, b = system(device, size, seed)
    with unchanged(matrix, b):
        options = {"tol": 1e-10, "maxiter": 2000, "damping": damping}
        x, info = SOLVERS[name](lambda v: matrix @ v, b, **options)
    damped = matrix + damping * torch.eye(size, dtype=F64, device=device)
    torch.testing.assert_close(x, torch.linalg.solve(damped, b), rtol=1e-8, atol=1e-8)
    assert info.residual <= 1e-10
    assert info.iterations <= (2000 if name == "neumann" else size + 2)
    left = (b - damped @ x).norm() / b.norm()
    torch.testing.assert_close(info.residual, left, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_trees_none_and_where_to_start(device: torch.device, name: str) -> None:
    matrix, b = system(device, 6)

    def matvec(v: Any) -> Any:
        v = tree.add(v, zeros)  # None is zero
        out = matrix @ torch.cat([v["a"], v["b"][0].reshape(-1)])
        return {"b": [out[2:].view(2, 2), None], "a": out[:2]}

    zeros = {"a": b[:2] * 0, "b": [b[2:].view(2, 2) * 0, None]}
    right = {"a": b[:2], "b": [None, None]}
    x, _ = SOLVERS[name](matvec, right, tol=1e-12, maxiter=2000)
    expected = torch.linalg.solve(matrix, torch.cat([b[:2], b[2:] * 0]))
    torch.testing.assert_close(torch.cat([x["a"], x["b"][0].reshape(-1)]), expected)
    assert x["b"][1] is None
    if name != "neumann":
        again, of_none = SOLVERS[name](matvec, right, x0=x, tol=1e-6)
        assert of_none.iterations == 0
        assert tree.allclose(again, x)
        near = tree.scale(x, 1.1)
        again, fewer = SOLVERS[name](matvec, right, x0=near, tol=1e-10)
        assert tree.allclose(again, x)
        assert fewer.residual <= 1e-10


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_right_hand_sides_of_any_size(device: torch.device, name: str, size: float) -> None:
    matrix, b = (x.float() for x in system(device, 4))
    x, info = SOLVERS[name](lambda v: [matrix @ v[0]], [b * size], maxiter=500)
    expected = torch.linalg.solve(matrix, b)
    torch.testing.assert_close(x[0] / size, expected, rtol=1e-4, atol=1e-4)
    assert 0 < info.iterations < 500


@pytest.mark.parametrize("name", SOLVERS)
def test_zero_has_the_solution_zero(device: torch.device, name: str) -> None:
    zero = torch.zeros(3, device=device)
    x, info = SOLVERS[name](lambda v: [2 * v[0], None], [zero, None], tol=1e-6)
    assert torch.equal(x[0], zero)
    assert x[1] is None
    assert (float(info.residual), info.iterations) == (0.0, 0)


def test_what_has_no_end_says_so_and_stops(device: torch.device) -> None:
    matrix, b = system(device, 8)
    _, info = tree.cg(lambda v: matrix @ v, b, tol=1e-12, maxiter=3)
    assert info.iterations == 3
    assert info.residual > 1e-12
    _, info = tree.cg(lambda v: v * float("nan"), b, maxiter=50)
    assert info.residual.isnan()
    assert info.iterations == 1
    flat = torch.tensor([1.0, 0.0], device=device)  # a matrix without an inverse
    _, info = tree.cg(lambda v: flat * v, torch.ones(2, device=device))
    assert not info.residual <= 1e-6
    _, info = tree.neumann(lambda v: 3 * v, b, step=1.0, maxiter=20)  # which diverges
    assert info.residual > 1


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), size=st.integers(1, 12), restart=st.integers(3, 20))
def test_gmres_of_a_matrix_that_is_not_symmetric(
    device: torch.device, seed: int, size: int, restart: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=source, dtype=F64)
    matrix = (matrix / size**0.5 + 2 * torch.eye(size, dtype=F64)).to(device)
    b = torch.randn(size, generator=source, dtype=F64).to(device)
    x, info = tree.gmres(lambda v: matrix @ v, b, tol=1e-12, maxiter=400, restart=restart)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b), rtol=1e-8, atol=1e-9)
    assert info.residual <= 1e-12
    if restart >= size:
        assert info.iterations <= size + 1


def test_gmres_where_the_matrix_is_singular(device: torch.device) -> None:
    """It leaves what no product can reach, and solves what has a solution."""
    flat = torch.diag(torch.tensor([2.0, 0.0], dtype=F64, device=device))
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=F64, device=device)
    b = torch.tensor([1.0, 1.0], dtype=F64, device=device)
    _, info = tree.gmres(lambda v: flat @ v, b)
    torch.testing.assert_close(float(info.residual), 0.5**0.5)
    x, info = tree.gmres(lambda v: flat @ v, flat @ b)
    torch.testing.assert_close(flat @ x, flat @ b)
    assert info.residual <= 1e-6
    x, _ = tree.gmres(lambda v: turn @ v, b)  # of which the first step leaves everything
    torch.testing.assert_close(turn @ x, b)
    _, info = tree.gmres(lambda v: v * float("nan"), b)
    assert info.residual.isnan()
    assert info.iterations == 1


@pytest.mark.parametrize("name", SOLVERS)
def test_gauss_newton_steps_of_a_model(device: torch.device, name: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    call, params, buffers = func.make_functional(net.to(device, F64))
    x, y = torch.randn(9, 3, device=device, dtype=F64), torch.arange(9, device=device) % 2

    def outputs(params: Any) -> Tensor:
        return call(params, buffers, x)[0]

    def loss(out: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(out, y)

    with torch.no_grad():
        _, grads = func.value_and_grads(lambda p: loss(outputs(p)))(params)
        step, _ = SOLVERS[name](
            lambda v: func.ggn_vp(outputs, loss, params, v)[1],
            grads, damping=0.5, tol=1e-9, maxiter=1000,
        )  # fmt: skip
        _, product = func.ggn_vp(outputs, loss, params, step)
    assert tree.allclose(tree.add(product, tree.scale(step, 0.5)), grads, rtol=1e-6, atol=1e-8)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"(?s)torch\.no_grad.*implicit"):
        SOLVERS[name](lambda v: func.ggn_vp(outputs, loss, params, v)[1], grads)


def test_what_they_refuse(device: torch.device) -> None:
    b = torch.ones(2, device=device)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda s: s(3, b), ValueError, "matvec: expected a function"),
        (lambda s: s(lambda v: v, b, tol=-1.0), ValueError, "tol: expected a number of at least 0"),
        (lambda s: s(lambda v: v, b, damping="a"), ValueError, "damping: expected a real number"),
        (lambda s: s(lambda v: v, b, maxiter=0), ValueError, "maxiter: expected a positive int"),
        (lambda s: s(lambda v: v[:1], b), ValueError, r"matvec\(v\): expected the shape"),
        (lambda s: s(lambda v: {"w": v}, b), TypeError, r"matvec\(v\)"),
        (lambda s: s(lambda v: v, 2.0), TypeError, "b: expected a tensor"),
        (lambda s: s(lambda v: v, b.clone().requires_grad_()), RuntimeError, "b: .*require grad"),
        (lambda s: func.jvp(lambda b: s(lambda v: v, b)[0], (b,), (b,)), RuntimeError, "a tangent"),
        (
            lambda s: func.jvp(lambda a: s(lambda v: a * v, b)[0], (b,), (b,)),
            RuntimeError,
            r"matvec\(v\): .*a tangent",
        ),
        (lambda _: tree.cg(lambda v: v, b, x0=b[:1]), ValueError, "x0: expected the shape"),
        (lambda _: tree.gmres(lambda v: v, b, restart=0), ValueError, "restart: expected a posit"),
        (lambda _: tree.neumann(lambda v: v, b, step="a"), ValueError, "step: expected a real"),
    ]
    for solve in SOLVERS.values():
        for call, error, text in cases:
            with unchanged(b), pytest.raises(gradkit.GradkitError, match=text) as caught:
                call(solve)
            assert isinstance(caught.value, error)
