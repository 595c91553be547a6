"""Operations whose rules are wrong at some values: singular matrices, ties, zeros, far apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, jvp

import gradkit
from gradkit import func
from tests.silently_wrong._row import Case, D, Row

Function = Callable[[Tensor], Tensor]


def _by_hand(a: Tensor) -> Tensor:
    return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]


def _eager(fn: Function, written: Function, x: Tensor) -> Case:
    def slope(fn: Function) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(fn(leaf), leaf)[0]

    def ours() -> Tensor:
        leaf = x.clone().requires_grad_()
        return gradkit.value_and_grads(fn(leaf), leaf)[1]

    return Case(slope(fn), slope(written), ours)


def gradient_of_a_singular_matrix(device: torch.device) -> Case:
    a = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D, device=device)
    return _eager(torch.linalg.det, _by_hand, a)


def _greatest(x: Tensor) -> Tensor:
    five, where = x.new_full((1,), 5.0), torch.zeros(2, dtype=torch.long, device=x.device)
    return five.scatter_reduce(0, where, x, "amax", include_self=False).sum()


def tie_with_what_is_not_included(device: torch.device) -> Case:
    return _eager(_greatest, Tensor.amax, torch.tensor([5.0, 3.0], dtype=D, device=device))


def _probability(x: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))


def _of_logits(x: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(x, torch.ones_like(x))


def entropy_of_a_saturated_sigmoid(device: torch.device) -> Case:
    return _eager(_probability, _of_logits, torch.tensor([-30.0], dtype=D, device=device))


def _real_part(x: Tensor) -> Tensor:
    return torch.polar(x, torch.zeros_like(x)).real.sum()


def polar_of_a_radius_of_zero(device: torch.device) -> Case:
    return _eager(_real_part, Tensor.sum, torch.zeros(1, dtype=D, device=device))


def cosine_below_its_eps(device: torch.device) -> Case:
    x, y = torch.tensor([[0.4, 0.3], [1.0, 0.0]], dtype=D, device=device)

    def cosine(x: Tensor) -> Tensor:
        return torch.cosine_similarity(x, y, dim=0, eps=1.0)

    return _eager(cosine, lambda x: x @ y, x)


def zeros_made_sparse(device: torch.device) -> Case:
    x = torch.tensor([0.0, 1.0], dtype=D, device=device)

    def through_sparse(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense().sum()

    return _eager(through_sparse, Tensor.sum, x)


def second_of_a_zeroth_power(device: torch.device) -> Case:
    """The derivative, by the exponent, of the slope with respect to the base, at 2 ** 0."""
    two, zero = torch.tensor([2.0, 0.0], dtype=D, device=device)

    def slope(y: Tensor) -> Tensor:
        return grad(torch.pow)(two, y)

    def ours() -> Tensor:
        inner = func.value_and_grads(torch.pow)
        return func.value_and_grads(lambda y: inner(two, y)[1])(zero)[1]

    return Case(grad(slope)(zero), 1 / two, ours)


def _over_reverse(fn: Function, right: Tensor, x: Tensor, along: Tensor) -> Case:
    theirs = jvp(grad(fn), (x,), (along,))[1]
    return Case(theirs, right, lambda: func.hvp(fn, x, along)[1])


def second_of_sinc_at_zero(device: torch.device) -> Case:
    zero = torch.zeros((), dtype=D, device=device)
    series: Function = lambda x: 1 - (torch.pi * x) ** 2 / 6  # noqa: E731
    right = jvp(grad(series), (zero,), (zero + 1,))[1]
    return _over_reverse(torch.sinc, right, zero, zero + 1)


def block_diag_of_an_empty_vector(device: torch.device) -> Case:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D, device=device)

    def with_empty(x: Tensor) -> Tensor:
        return (torch.block_diag(x[:0], x) * weights).sum()

    def as_matrix(x: Tensor) -> Tensor:
        return (torch.block_diag(x[None, :0], x) * weights).sum()

    return _eager(with_empty, as_matrix, torch.ones(2, dtype=D, device=device))


def ties_of_distances(device: torch.device) -> Case:
    x = torch.tensor([[2.0, 2.0, 1.0]], dtype=D, device=device)
    zero = torch.zeros_like(x)
    return _eager(
        lambda x: torch.cdist(x, zero, p=torch.inf).sum(),
        lambda x: torch.linalg.vector_norm(x, torch.inf),
        x,
    )


def ctc_loss_of_no_log_softmax(device: torch.device) -> Case:
    x = torch.tensor([[0.2, 0.8], [0.6, 0.4]], dtype=D, device=device).log()
    target, two = torch.ones(1, dtype=torch.long, device=device), torch.tensor(2, device=device)
    return _eager(
        lambda x: torch.nn.functional.ctc_loss(x, target, two, two - 1, reduction="sum"),
        lambda x: (
            -torch.stack([x[0, 1] + x[1, 1], x[0, 0] + x[1, 1], x[0, 1] + x[1, 0]]).logsumexp(0)
        ),
        x,
    )


def space_beyond_a_matrix(device: torch.device) -> Case:
    a = torch.tensor([[3.0], [4.0]], dtype=D, device=device)
    y = torch.tensor([1.0, 0.0], dtype=D, device=device)
    return _eager(
        lambda a: (torch.linalg.svd(a).U[:, 1] @ y).square(),
        lambda a: y.square().sum() - (a[:, 0] @ y).square() / a.square().sum(),
        a,
    )


def second_of_a_norm_of_zero(device: torch.device) -> Case:
    x, along = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=D, device=device)

    def squared(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x) ** 2

    def written(x: Tensor) -> Tensor:
        return x.square().sum()

    def product(x: Tensor) -> Tensor:
        return func.hvp(written, x, along)[1]

    theirs, right = jvp(grad(squared), (x,), (along,))[1], jvp(grad(written), (x,), (along,))[1]
    ours, instead = lambda: func.hvp(squared, x, along)[1], lambda: product(x)
    return Case(theirs, right, ours, instead)


def jvp_of_logcumsumexp(device: torch.device) -> Case:
    x = torch.tensor([0.0, 100.0, 1000.0], dtype=D, device=device)
    along = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)
    sums: Function = partial(torch.logcumsumexp, dim=0)
    each = torch.stack([torch.func.grad(lambda x, i=i: sums(x)[i])(x) for i in range(3)])
    return Case(
        jvp(sums, (x,), (along,))[1], each @ along, lambda: func.jvp(sums, (x,), (along,))[1]
    )


ROWS = [
    Row(
        "`jvp(grad(torch.sinc), (x,), (v,))[1]` at zero",
        0.0, -3.2899, "`func.hvp`", second_of_sinc_at_zero,
    ),
    Row(
        "`jvp` of `torch.logcumsumexp(x, 0)` at `[0, 100, 1000]`",
        [0.0, 0.0, 3.0], [1.0, 2.0, 3.0], "`func.jvp`", jvp_of_logcumsumexp,
    ),
    Row(
        "`grad(lambda y: grad(torch.pow)(two, y))(zero)`",
        0.0, 0.5, "`func.value_and_grads`, nested", second_of_a_zeroth_power,
    ),
    Row(
        "`jvp(grad(lambda x: vector_norm(x) ** 2), (x,), (v,))[1]` at 0, where `v` is `[1, 2]`",
        [0.0, 0.0], [2.0, 4.0], "`func.hvp`", second_of_a_norm_of_zero,
        refuses=gradkit.UnsupportedGraphError, instead="`func.hvp` of `x.square().sum()`",
    ),
]  # fmt: skip

_SEEN = "`func`, `checked()`: right; `per_loss_grads`: `UnsupportedGraphError`; `value_and_grads`"
UNSEEN = [
    Row(
        "`grad(torch.linalg.det(a), a)` at `[[1, 2], [2, 4]]`",
        [[0.0, 0.0], [0.0, 0.0]], [[4.0, -2.0], [-2.0, 1.0]],
        _SEEN, gradient_of_a_singular_matrix, same=True,
    ),
    Row(
        '`grad(five.scatter_reduce(0, zeros, x, "amax", include_self=False), x)` at `[5, 3]`',
        [0.5, 0.0], [1.0, 0.0], _SEEN, tie_with_what_is_not_included, same=True,
    ),
    Row(
        "`grad(binary_cross_entropy(sigmoid(x), one), x)` at -30",
        [-0.0936], [-1.0], _SEEN, entropy_of_a_saturated_sigmoid, same=True,
    ),
    Row(
        "`grad(polar(r, zero).real, r)` at 0", [0.0], [1.0], _SEEN, polar_of_a_radius_of_zero,
        same=True,
    ),
    Row(
        "`grad(torch.cdist(x, zero, p=torch.inf).sum(), x)` at `[[2, 2, 1]]`, a tie",
        [[1.0, 1.0, 0.0]], [[0.5, 0.5, 0.0]], _SEEN, ties_of_distances, same=True,
    ),
    Row(
        "`grad(ctc_loss(x, target, ...), x)`, where `x` is not the output of a `log_softmax`",
        [[0.1091, -0.1091], [0.0545, -0.0545]], [[-0.0909, -0.9091], [-0.5455, -0.4545]],
        _SEEN, ctc_loss_of_no_log_softmax, same=True,
    ),
    Row(
        "`grad((torch.linalg.svd(a).U[:, 1] @ y) ** 2, a)` at `[[3], [4]]`, where `y` is `[1, 0]`",
        [[0.0], [0.0]], [[-0.1536], [0.1152]],
        "`func`, `checked()`: right; `value_and_grads`", space_beyond_a_matrix, same=True,
    ),
    Row(
        "`grad(cosine_similarity(x, y, dim=0, eps=1.0), x)` at `[0.4, 0.3]`, where `y` is `[1, 0]`",
        [0.68, -0.24], [1.0, 0.0], "`checked()`: right; `value_and_grads`",
        cosine_below_its_eps, same=True,
    ),
    Row(
        "`grad((block_diag(empty, x) * weights).sum(), x)`, where `empty` is of shape `(0,)`",
        [1.0, 2.0], [3.0, 4.0], "`checked()`: right; `value_and_grads`",
        block_diag_of_an_empty_vector, same=True,
    ),
    Row(
        "`grad(x.to_sparse().to_dense().sum(), x)` at `[0, 1]`; torch documents this",
        [0.0, 1.0], [1.0, 1.0], "every call", zeros_made_sparse, same=True,
    ),
]  # fmt: skip
