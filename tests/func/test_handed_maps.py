"""Linear maps that gradkit hands to the caller, differentiated by the caller in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import gradkit
from gradkit import func, meta, tree

F64 = torch.float64
Map: TypeAlias = Callable[[Tensor], Tensor]


def eye(x: Tensor) -> Tensor:
    return torch.eye(x.numel(), dtype=x.dtype, device=x.device)


def by_engine(fn: Map, u: Tensor) -> Tensor:
    u = u.clone().requires_grad_()
    out = fn(u)
    rows = [torch.autograd.grad(out, u, row, retain_graph=True)[0] for row in eye(out)]
    return torch.stack(rows)


# Each returns the matrix of a linear map.
WAYS: dict[str, Callable[[Map, Tensor], Tensor]] = {
    "autograd.grad": by_engine,
    "batched autograd.grad": lambda fn, u: torch.autograd.functional.jacobian(
        fn, u, vectorize=True
    ),
    "vjp": lambda fn, u: torch.stack([vjp(fn, u)[1](row)[0] for row in eye(fn(u))]),
    "jvp": lambda fn, u: torch.stack([jvp(fn, (u,), (row,))[1] for row in eye(u)], 1),
    "jacrev": lambda fn, u: jacrev(fn)(u),
    "jacfwd": lambda fn, u: jacfwd(fn)(u),
    "vmap": lambda fn, u: vmap(fn)(eye(u)).T,
    "jacrev of vmap": lambda fn, u: jacrev(lambda u: vmap(fn)(u[None])[0])(u),
    "vmap of jacrev": lambda fn, u: vmap(jacrev(fn))(torch.stack([u, 2 * u]))[1],
    "hessian": lambda fn, u: torch.stack([
        hessian(lambda u, i=i: fn(u)[i] * u.sum())(u).mean(0) for i in range(len(fn(u)))
    ]),
    "func.vjp": lambda fn, u: torch.stack([func.vjp(fn, u)[1](row)[0] for row in eye(fn(u))]),
    "func.jvp": lambda fn, u: torch.stack([func.jvp(fn, u, row)[1] for row in eye(u)], 1),
    "func.linearize": lambda fn, u: vmap(func.linearize(fn, u)[1])(eye(u)).T,
    "func.per_loss_grads": lambda fn, u: func.per_loss_grads(fn)(u),
}


def expected_of(way: str, matrix: Tensor) -> Tensor:
    # The mean of the rows of the Hessian of (Au)_i sum(u): A_ij is there once in each row j, ...
    if way != "hessian":
        return matrix
    return matrix + matrix.mean(1, keepdim=True)


def model(w: Tensor) -> Tensor:
    rows = torch.arange(12, dtype=w.dtype, device=w.device).cos().reshape(4, 3)
    return (rows @ w).sin()


def curved(out: Tensor) -> Tensor:
    return out.logsumexp(0) + (out**3).sum()


def maps(w: Tensor) -> dict[str, tuple[Map, Tensor]]:
    """The map, and its matrix."""
    point = w.detach()
    jacobian, inner = jacrev(model)(point), hessian(curved)(model(point))
    pull, push = func.vjp(model, w)[1], func.linearize(model, w)[1]
    with_aux = func.vjp(lambda w: (model(w), w), w, has_aux=True)[1]
    unravel = tree.to_matrix([{"a": point, "b": point[:2]}])[1]
    linear = nn.Linear(3, 2, bias=False, device=w.device, dtype=w.dtype)
    call, params, _ = func.make_functional(linear)

    def hvp(u: Tensor) -> Tensor:
        return func.hvp(lambda w: curved(model(w)), w, u)[1]

    return {
        "pull": (lambda u: pull(u)[0], jacobian.T),
        "pull with aux": (lambda u: with_aux(u)[0], jacobian.T),
        "push": (push, jacobian),
        "hvp": (hvp, hessian(lambda w: curved(model(w)))(point)),
        "ggn_vp": (lambda u: func.ggn_vp(model, curved, w, u)[1], jacobian.T @ inner @ jacobian),
        "unravel": (
            lambda u: torch.cat([unravel(u)["b"], unravel(u)["a"]]),
            torch.eye(5, dtype=w.dtype, device=w.device)[[3, 4, 0, 1, 2]],
        ),
        "make_functional": (lambda u: call(params, {}, u)[0], linear.weight.detach()),
    }


MAPS = ("pull", "pull with aux", "push", "hvp", "ggn_vp", "unravel", "make_functional")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_map_is_differentiated(
    device: torch.device, requires_grad: bool, name: str, way: str
) -> None:
    w = torch.randn(3, dtype=F64, device=device).requires_grad_(requires_grad)
    fn, matrix = maps(w)[name]
    u = torch.randn(matrix.shape[1], dtype=F64, device=device)
    torch.testing.assert_close(WAYS[way](fn, u).detach(), expected_of(way, matrix))


INNER_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "quadratic": lambda w: w[0] * w[1] + 3 * w.square().sum(),
    "curved": lambda w: w.exp().sum() + w.square().sum() ** 2,
    "log_softmax": lambda w: -w.log_softmax(0)[1] + w.square().sum(),
}


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INNER_LOSSES)
def test_the_product_of_a_solver_is_differentiated(
    device: torch.device, name: str, way: str, damping: float
) -> None:
    def inner_loss(w: Tensor, outer: Tensor) -> Tensor:
        return INNER_LOSSES[name](w) - (outer * w).sum()

    at = torch.randn(3, dtype=F64, device=device)
    matrix = hessian(INNER_LOSSES[name])(at) + damping * eye(at)
    outer = grad(INNER_LOSSES[name])(at).requires_grad_()
    solved = []

    def solve(matvec: Map, v: Tensor) -> Tensor:
        solved.append(WAYS[way](matvec, torch.randn_like(v)).detach())
        # The normal equations, as least squares would take them.
        transposed = lambda u: vjp(matvec, u)[1](u)[0]  # noqa: E731
        normal = torch.stack([transposed(matvec(row)) for row in eye(v)], 1)
        return torch.linalg.solve(normal, transposed(v))

    find = meta.implicit(lambda w, outer: at.clone(), inner_loss, solve=solve, damping=damping)
    loss = find(torch.zeros_like(at), outer).sin().sum()
    grads = gradkit.value_and_grads(loss, outer)[1]
    torch.testing.assert_close(solved, [expected_of(way, matrix)])
    torch.testing.assert_close(grads, torch.linalg.solve(matrix, at.cos()))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _TwiceTheProduct.apply(x, cotangent)


class _TwiceTheProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cotangent: Tensor) -> Tensor:
        ctx.save_for_backward(x, cotangent)
        return 2 * x * cotangent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, other = ctx.saved_tensors
        return 2 * other * cotangent, 2 * x * cotangent


def test_a_product_that_has_no_derivative_is_refused(device: torch.device) -> None:
    outer = torch.ones(2, dtype=F64, device=device, requires_grad=True)

    def solve(matvec: Map, v: Tensor) -> Tensor:
        torch.testing.assert_close(vmap(matvec)(eye(v)), 2 * eye(v))
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"matvec\(u\).*_TwiceTheProduct"):
            vjp(matvec, v)
        return v / 2

    def inner_loss(w: Tensor, outer: Tensor) -> Tensor:
        return Once.apply(w).sum() - (outer * w).sum()

    find = meta.implicit(lambda w, outer: outer / 2, inner_loss, solve=solve)
    grads = gradkit.value_and_grads(find(torch.zeros_like(outer), outer).sum(), outer)[1]
    torch.testing.assert_close(grads, torch.full_like(outer, 0.5))
