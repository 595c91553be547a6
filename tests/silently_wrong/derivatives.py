"""Forward mode, derivatives of forward mode, second derivatives in a batch, third derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional

import gradkit
from gradkit import func
from tests.helpers import OnceCubed
from tests.silently_wrong._row import Case, D, Row


def _derivative_of_jvp(fn: Callable[[Tensor], Tensor], device: torch.device) -> Case:
    a = torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=D, device=device)
    along = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D, device=device)

    def slope(a: Tensor) -> Tensor:
        return jvp(fn, (a,), (along,))[1]

    return Case(
        grad(slope)(a),
        grad(lambda a: (grad(fn)(a) * along).sum())(a),
        lambda: func.value_and_grads(slope)(a),
        lambda: func.hvp(fn, a, along)[1],
    )


def derivative_of_jvp_of_det(device: torch.device) -> Case:
    return _derivative_of_jvp(torch.linalg.det, device)


def derivative_of_jvp_of_slogdet(device: torch.device) -> Case:
    return _derivative_of_jvp(lambda a: torch.linalg.slogdet(a).logabsdet, device)


def derivative_of_jvp_of_logdet(device: torch.device) -> Case:
    return _derivative_of_jvp(torch.logdet, device)


def _forward_over_reverse(fn: Callable[[Tensor], Tensor], x: Tensor, along: Tensor) -> Case:
    def loss(x: Tensor) -> Tensor:
        return fn(x).square().sum()

    return Case(
        jvp(grad(loss), (x,), (along,))[1],
        grad(lambda x: (grad(loss)(x) * along).sum())(x),
        lambda: func.hvp(loss, x, along),
        lambda: func.hvp(loss, x, along, mode="reverse-over-reverse")[1],
    )


def forward_over_cholesky_inverse(device: torch.device) -> Case:
    lower = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=D, device=device)
    return _forward_over_reverse(
        torch.cholesky_inverse, lower, torch.eye(2, dtype=D, device=device)
    )


def forward_over_triangular_solve(device: torch.device) -> Case:
    a = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=D, device=device)
    b = torch.tensor([[1.0], [2.0]], dtype=D, device=device)
    return _forward_over_reverse(
        lambda a: torch.triangular_solve(b, a, unitriangular=True).solution,
        a,
        torch.eye(2, dtype=D, device=device),
    )


def forward_over_scatter_reduce(device: torch.device) -> Case:
    ones = torch.ones(2, dtype=D, device=device)
    where = torch.tensor([0, 0, 1], device=device)
    return _forward_over_reverse(
        lambda x: ones.scatter_reduce(0, where, x, "prod"),
        torch.tensor([2.0, 3.0, 5.0], dtype=D, device=device),
        torch.ones(3, dtype=D, device=device),
    )


def layer_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w)


def batch_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    return functional.batch_norm(x.T, None, None, w, training=True).T


def instance_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    return functional.instance_norm(x[None], weight=w)[0]


def by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _second_in_a_batch(norm: Callable[..., Tensor], device: torch.device) -> Case:
    """The derivative, by the weight, of the squared gradients of two samples."""
    x = torch.tensor([1.0, 2.0, 4.0, 3.0, 7.0, 5.0], dtype=D, device=device).reshape(2, 1, 3)
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)

    def loss(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return norm((x * scale).expand(3, 3), w).sin().sum()

    def squared(w: Tensor, x: Tensor) -> Tensor:
        by_w, by_scale = grad(loss, (0, 1))(w, w, x)
        return by_w.square().sum() + by_scale.square().sum()

    def total(w: Tensor) -> Tensor:
        return vmap(squared, (None, 0))(w, x).sum()

    def ours() -> Tensor:
        return vmap(func.value_and_grads(squared), (None, 0))(w, x)[1].sum(0)

    right = torch.stack([grad(squared)(w, sample) for sample in x]).sum(0)
    return Case(grad(total)(w), right, lambda: func.value_and_grads(total)(w), ours)


def second_in_a_batch_of_layer_norm(device: torch.device) -> Case:
    return _second_in_a_batch(layer_norm, device)


def second_in_a_batch_of_batch_norm(device: torch.device) -> Case:
    return _second_in_a_batch(batch_norm, device)


def second_in_a_batch_of_instance_norm(device: torch.device) -> Case:
    return _second_in_a_batch(instance_norm, device)


def _third(norm: Callable[[Tensor], Tensor], device: torch.device) -> Case:
    start = torch.tensor([[1.0, 2.0, 4.0]], dtype=D, device=device)

    def theirs(norm: Callable[[Tensor], Tensor]) -> Tensor:
        x = start.clone().requires_grad_()
        out = norm(x).sin().sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            out = slope.square().sum()
        return torch.autograd.grad(out, x)[0]

    def ours(norm: Callable[[Tensor], Tensor]) -> Tensor:
        x = start.clone().requires_grad_()
        out = norm(x).sin().sum()
        for _ in range(2):
            _, slope = gradkit.value_and_grads(out, x, create_graph=True)
            out = slope.square().sum()
        return gradkit.value_and_grads(out, x)[1]

    return Case(theirs(norm), theirs(by_hand), lambda: ours(norm), lambda: ours(by_hand))


def third_of_layer_norm(device: torch.device) -> Case:
    return _third(layer_norm, device)


def third_of_batch_norm(device: torch.device) -> Case:
    return _third(batch_norm, device)


def third_of_instance_norm(device: torch.device) -> Case:
    return _third(instance_norm, device)


def derivative_of_jvp_of_layer_norm(device: torch.device) -> Case:
    x = torch.tensor([[1.0, 2.0, 4.0]], dtype=D, device=device)
    along = torch.tensor([[1.0, 0.0, 0.0]], dtype=D, device=device)

    def squared(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: jvp(norm, (x,), (along,))[1].square().sum()

    return Case(
        grad(squared(layer_norm))(x),
        grad(squared(by_hand))(x),
        lambda: func.value_and_grads(squared(layer_norm))(x),
        lambda: func.value_and_grads(squared(by_hand))(x)[1],
    )


def second_of_once_differentiable(device: torch.device) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def theirs(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = (f(w) + w**2).sum()
        (slope,) = torch.autograd.grad(out, w, create_graph=True)
        return torch.autograd.grad(slope.sum(), w)[0]

    def ours(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = (f(w) + w**2).sum()
        _, slope = gradkit.value_and_grads(out, w, create_graph=True)
        return gradkit.value_and_grads(slope.sum(), w)[1]

    def cubed(x: Tensor) -> Tensor:
        return x**3

    once = OnceCubed.apply
    return Case(theirs(once), theirs(cubed), lambda: ours(once), lambda: ours(cubed))


Show = Callable[[torch.device], Case]
REFUSED = gradkit.UnsupportedGraphError


def of_jvp(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"`grad(lambda a: jvp({name}, (a,), (v,))[1])(a)`", gives, right,
        "`func.value_and_grads`", show, REFUSED, "`func.hvp(f, a, v)`",
    )  # fmt: skip


def over_reverse(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"`jvp(grad(f), (x,), (v,))[1]`, where `f` is the sum of squares of `{name}`", gives, right,
        "`func.hvp`", show, REFUSED, '`mode="reverse-over-reverse"`',
    )  # fmt: skip


def in_a_batch(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"`grad` of a sum over `vmap(grad(f))`, where `f` has a `{name}` with a weight",
        gives, right,
        "`func.value_and_grads`", show, REFUSED, "with the outer derivative inside the `vmap`",
    )  # fmt: skip


def third(name: str, gives: Any, right: Any, show: Show) -> Row:
    return Row(
        f"a third derivative through `{name}`, with `torch.autograd.grad`", gives, right,
        "`value_and_grads(..., create_graph=True)`", show, REFUSED, "with the norm written out",
    )  # fmt: skip


ROWS = [
    of_jvp(
        "torch.linalg.det",
        [[3.0, 0.0], [-3.0, 6.0]], [[4.0, -3.0], [-2.0, 1.0]], derivative_of_jvp_of_det,
    ),
    of_jvp(
        "slogdet",
        [[0.0, 0.0], [0.0, 0.0]], [[0.5, -1.5], [0.5, -2.5]], derivative_of_jvp_of_slogdet,
    ),
    of_jvp(
        "torch.logdet",
        [[0.0, 0.0], [0.0, 0.0]], [[0.5, -1.5], [0.5, -2.5]], derivative_of_jvp_of_logdet,
    ),
    over_reverse(
        "torch.cholesky_inverse",
        [[332.0, -176.0], [-144.0, 12.0]], [[140.0, -240.0], [-80.0, 140.0]],
        forward_over_cholesky_inverse,
    ),
    over_reverse(
        "torch.triangular_solve(..., unitriangular=True)",
        [[0.0, -52.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], forward_over_triangular_solve,
    ),
    over_reverse(
        'scatter_reduce(..., "prod")',
        [-18.0, -8.0, -2.0], [42.0, 32.0, 2.0], forward_over_scatter_reduce,
    ),
    in_a_batch(
        "layer_norm",
        [14.53, -250.5, 174.8], [16.36, -255.1, 163.5], second_in_a_batch_of_layer_norm,
    ),
    in_a_batch(
        "batch_norm",
        [7.589, -43.25, 28.77], [9.235, -45.06, 25.95], second_in_a_batch_of_batch_norm,
    ),
    in_a_batch(
        "instance_norm",
        [7.589, -43.25, 28.77], [9.235, -45.06, 25.95], second_in_a_batch_of_instance_norm,
    ),
    *(
        third(name, [[0.0586, -0.0929, -0.0648]], [[0.1688, -0.0406, -0.1282]], show)
        for name, show in (
            ("layer_norm", third_of_layer_norm),
            ("batch_norm", third_of_batch_norm),
            ("instance_norm", third_of_instance_norm),
        )
    ),
    Row(
        "a second derivative of `f(w) + w**2` at 1, with `torch.autograd.grad`, where `f` is a "
        "cube whose backward is `once_differentiable`",
        [2.0], [8.0], "`value_and_grads(..., create_graph=True)`", second_of_once_differentiable,
        REFUSED, "with a backward that can be differentiated",
    ),
    Row(
        "`grad(lambda x: jvp(layer_norm, (x,), (v,))[1].square().sum())(x)`",
        [[0.1050, -0.1574, 0.0525]], [[0.2099, -0.1312, -0.0787]],
        "`func.value_and_grads`", derivative_of_jvp_of_layer_norm, REFUSED,
        "with the norm written out",
    ),
]  # fmt: skip
