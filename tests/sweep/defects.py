"""The defects of torch's derivatives for which gradkit raises: what torch gives, and what is right.

test_defects.py tries each on the torch that is installed. docs/silently_wrong.md has a row for
each, with what gradkit does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap
from torch.nn import functional

from tests.sweep import matrix_examples
from tests.sweep.table import is_mended

D = torch.float64
Function: TypeAlias = Callable[[Tensor], Tensor]
Values: TypeAlias = tuple[Tensor, Tensor]  # what torch gives, and what is right
At: TypeAlias = tuple[Function, Tensor]  # a function, and where it is differentiated
Along: TypeAlias = tuple[Function, Tensor, Tensor]  # the same, and in which direction


# --- what is compared


def last_of_batch(fn: Function, x: Tensor) -> Values:
    """Return the gradient of the last element of a result: in a batch of all, and alone."""
    return jacrev(fn)(x)[-1], grad(lambda x: fn(x)[-1])(x)


def by_sample(fn: Function, x: Tensor) -> Values:
    """Return the gradients of samples: in one batch, and one by one."""
    return vmap(grad(fn))(x), torch.stack([grad(fn)(sample) for sample in x])


def of_jvp(fn: Function, x: Tensor, along: Tensor) -> Values:
    """Return a derivative of the directional derivative: by jvp, and by the gradient."""
    by_jvp = grad(lambda x: jvp(fn, (x,), (along,))[1])(x)
    return by_jvp, grad(lambda x: (grad(fn)(x) * along).sum())(x)


def over_reverse(fn: Function, x: Tensor, along: Tensor) -> Values:
    """Return a Hessian-vector product of the sum of squares: by jvp, and by two gradients."""
    slope = grad(lambda x: fn(x).square().sum())
    return jvp(slope, (x,), (along,))[1], grad(lambda x: (slope(x) * along).sum())(x)


def second(fn: Function, written: Function, x: Tensor) -> Values:
    """Return a second derivative: of a function, and of the function written out."""

    def squared_slope(fn: Function) -> Function:
        return lambda x: grad(lambda x: fn(x).sin().sum())(x).square().sum()

    return grad(squared_slope(fn))(x), grad(squared_slope(written))(x)


def third_by_forward(fn: Function, x: Tensor, along: Tensor) -> Values:
    """Return a third derivative along directions: by two jvps of a gradient, and by gradients."""
    slope = grad(lambda x: fn(x).sin().sum())
    by_jvp = jvp(lambda x: jvp(slope, (x,), (along,))[1], (x,), (along,))[1]
    curvature = grad(lambda x: (slope(x) * along).sum())
    return by_jvp, grad(lambda x: (curvature(x) * along).sum())(x)


def jvp_twice(device: torch.device) -> Values:
    """Return a second derivative of a cumulative product with a zero: by jvp, and by gradients."""
    x, along = torch.tensor([[2.0, 0.0, 3.0], [1.0, 1.0, 1.0]], dtype=D, device=device)

    def product(x: Tensor) -> Tensor:
        return torch.cumprod(x, 0).exp().sum()

    by_jvp = jvp(lambda x: jvp(product, (x,), (along,))[1], (x,), (along,))[1]
    return by_jvp, (grad(lambda x: (grad(product)(x) * along).sum())(x) * along).sum()


def in_two_vmaps(device: torch.device) -> Values:
    """Return the sums of the solutions of systems: under two vmaps, and one by one."""
    a, b = (torch.tensor(x, dtype=D, device=device) for x in matrix_examples.SYSTEMS)
    solve = matrix_examples.by_factors
    in_batches = vmap(lambda a: vmap(lambda b: solve(a, b).sum())(b))(a)
    return in_batches, torch.stack([solve(x, y).sum() for x in a for y in b]).view(2, 2)


def by_values(device: torch.device) -> Values:
    """Return a second derivative by the values of a tensor: of a sparse one, and of a dense one."""
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    return second(matrix_examples.sparse, matrix_examples.dense, x)


def squared_jvp(norm: Function, x: Tensor, along: Tensor) -> Values:
    """Return the derivative of a squared jvp: of a norm, and of the norm written out."""
    first, second = (
        grad(lambda x, fn=fn: jvp(fn, (x,), (along,))[1].square().sum())(x)
        for fn in (norm, by_hand)
    )
    return first, second


def third(norm: Function, x: Tensor) -> Values:
    """Return a third derivative: of a norm, and of the norm written out."""

    def differentiate(fn: Function) -> Tensor:
        leaf = x.clone().requires_grad_()
        out = fn(leaf).sin().sum()
        for _ in range(2):
            (slope,) = torch.autograd.grad(out, leaf, create_graph=True)
            out = slope.square().sum()
        return torch.autograd.grad(out, leaf)[0]

    return differentiate(norm), differentiate(by_hand)


def second_in_batch(norm: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Values:
    """Return a derivative of the squared gradients of samples: in a batch, and one by one."""
    squared = squared_gradient(norm)
    in_batch = grad(lambda w: vmap(squared, (None, 0))(w, x).sum())(weight)
    return in_batch, torch.stack([grad(squared)(weight, sample) for sample in x]).sum(0)


def squared_gradient(norm: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the squared gradient of a loss through a norm, of its weight and a sample."""

    def loss(w: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        return norm((x * scale).expand(3, 3), w).sin().sum()

    def squared(w: Tensor, x: Tensor) -> Tensor:
        by_w, by_scale = grad(loss, (0, 1))(w, w, x)
        total: Tensor = by_w.square().sum() + by_scale.square().sum()
        return total

    return squared


# --- what is differentiated


def cdist(device: torch.device) -> At:
    """Return distances of points to others."""
    x = torch.tensor([[0.0, 0.0], [4.0, 3.0]], dtype=D, device=device)
    other = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=D, device=device)
    return lambda x: torch.cdist(x, other).sum(1), x


def masked_select(device: torch.device) -> At:
    """Return a selection by a mask of more dimensions."""
    mask = torch.eye(2, dtype=torch.bool, device=device)
    return lambda x: torch.masked_select(x, mask), torch.tensor([1.0, 2.0], dtype=D, device=device)


def roll(device: torch.device) -> At:
    """Return a roll of tensors without dimensions."""
    return lambda x: torch.roll(x, 1) * x, torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)


def index_fill(device: torch.device) -> At:
    """Return a tensor that is filled with a tensor's value."""
    zero = torch.tensor([0], device=device)
    ones = torch.ones(3, dtype=D, device=device)
    x = torch.tensor([10.0, 20.0], dtype=D, device=device)
    return lambda x: torch.index_fill(ones, 0, zero, x).square().sum(), x


def select_scatter(device: torch.device) -> Values:
    """Return the gradient of a sum over a batch of cubes that are scattered, and one by one."""
    zeros = torch.zeros(2, 2, dtype=D, device=device)
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    by_row = [grad(scattered_cubes, 1)(*sample) for sample in zip(zeros, x, strict=True)]
    return grad(lambda x: vmap(scattered_cubes)(zeros, x).sum())(x), torch.stack(by_row)


def scattered_cubes(row: Tensor, x: Tensor) -> Tensor:
    """Return the sum of the cubes of a row, into which a number was scattered."""
    return (torch.select_scatter(row, x, 0, 1) ** 3).sum()


def as_strided_scatter(device: torch.device) -> Values:
    """Return the gradient of the squares that a scatter of a zero leaves, and of a `where`."""
    zero = torch.zeros(1, dtype=D, device=device)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)
    middle = torch.arange(3, device=device) == 1
    by_scatter = grad(lambda x: torch.as_strided_scatter(x, zero, (1,), (1,), 1).square().sum())
    return by_scatter(x), grad(lambda x: torch.where(middle, 0.0, x).square().sum())(x)


def determinant(fn: Function, device: torch.device) -> Along:
    """Return a function of a matrix, at one, along another."""
    matrices = [[[2.0, 1.0], [0.0, 1.0]], [[1.0, 2.0], [3.0, 4.0]]]
    x, along = torch.tensor(matrices, dtype=D, device=device)
    return fn, x, along


def slogdet(a: Tensor) -> Tensor:
    """Return the logarithm of a determinant's absolute value."""
    logarithm: Tensor = torch.linalg.slogdet(a).logabsdet
    return logarithm


def cholesky_inverse(device: torch.device) -> Along:
    """Return the inverse by a Cholesky factor."""
    lower = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=D, device=device)
    return torch.cholesky_inverse, lower, torch.eye(2, dtype=D, device=device)


def triangular_solve(device: torch.device) -> Along:
    """Return the solution of a system whose diagonal counts as ones."""
    a = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=D, device=device)
    b = torch.tensor([[1.0], [2.0]], dtype=D, device=device)

    def solve(a: Tensor) -> Tensor:
        solution: Tensor = torch.triangular_solve(b, a, unitriangular=True).solution
        return solution

    return solve, a, torch.eye(2, dtype=D, device=device)


def scatter_reduce(device: torch.device) -> Along:
    """Return products of the entries with one index."""
    ones, where = torch.ones(2, dtype=D, device=device), torch.tensor([0, 0, 1], device=device)
    x = torch.tensor([2.0, 3.0, 5.0], dtype=D, device=device)
    return lambda x: ones.scatter_reduce(0, where, x, "prod"), x, torch.ones_like(x)


def layer_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Return the rows normalized."""
    return functional.layer_norm(x, x.shape[-1:], w)


def batch_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Return the rows normalized."""
    return functional.batch_norm(x.T, None, None, w, training=True).T


def instance_norm(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Return the rows normalized."""
    return functional.instance_norm(x[None], weight=w)[0]


def by_hand(x: Tensor) -> Tensor:
    """Return the rows normalized, in operations whose derivatives are right."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def row_and_direction(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a row to normalize, and a direction."""
    rows = torch.tensor([[[1.0, 2.0, 4.0]], [[1.0, 0.0, 0.0]]], dtype=D, device=device)
    return rows[0], rows[1]


def rows_and_weight(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two samples of a row, and a weight."""
    x = torch.tensor([1.0, 2.0, 4.0, 3.0, 7.0, 5.0], dtype=D, device=device).reshape(2, 1, 3)
    return x, torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)


# --- the list


@dataclass(frozen=True)
class Defect:
    """A derivative that torch computes wrongly."""

    operation: str
    derivative: str  # which one of it is wrong
    values: Callable[[torch.device], Values]  # what torch gives on a device, and what is right
    key: str = ""  # its name in `swept.json`; that of the operation, if empty

    def tried(self, device: torch.device) -> Trial:
        """Return what torch does on a device."""
        refused = not is_mended(self.key or self.operation)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = "right" if torch.allclose(*self.values(device)) else "wrong"
        except Exception:  # another version of torch may raise anything
            outcome = "raises"
        return Trial(str(device), self.operation, self.derivative, outcome, refused)


@dataclass(frozen=True)
class Trial:
    """What the torch that is installed does about a defect."""

    device: str
    operation: str
    derivative: str
    outcome: str  # torch is "wrong" or "right", or "raises" by itself
    refused: bool  # gradkit raises for it

    @property
    def equal(self) -> bool:
        """Whether gradkit raises where torch is silently wrong, and only there."""
        return self.refused is (self.outcome == "wrong")


def _of_jvp(name: str, fn: Function) -> Defect:
    return Defect(name, "the gradient of a jvp", lambda d: of_jvp(*determinant(fn, d)))


def _by_forward(name: str, fn: Function) -> Defect:
    derivative = "a third derivative by forward mode"
    return Defect(name, derivative, lambda d: third_by_forward(*determinant(fn, d)))


def _over_reverse(name: str, example: Callable[[torch.device], Along]) -> Defect:
    derivative = "a Hessian-vector product by forward mode"
    return Defect(name, derivative, lambda d: over_reverse(*example(d)))


def _of_norm(name: str, norm: Callable[..., Tensor]) -> list[Defect]:
    def by_jvp(device: torch.device) -> Values:
        return squared_jvp(norm, *row_and_direction(device))

    def by_sample_twice(device: torch.device) -> Values:
        return second_in_batch(norm, *rows_and_weight(device))

    def thrice(device: torch.device) -> Values:
        return third(norm, row_and_direction(device)[0])

    kernel = "LayerNorm" if name == "layer_norm" else "BatchNorm"
    return [
        Defect(name, "the gradient of a squared jvp", by_jvp),
        Defect(name, "the gradient of per-sample gradients", by_sample_twice),
        Defect(name, "the third derivative", thrice, f"Native{kernel}BackwardBackward0"),
    ]


DEFECTS = [
    Defect("cdist", "a batched backward pass", lambda d: last_of_batch(*cdist(d))),
    Defect("masked_select", "a batched backward pass", lambda d: last_of_batch(*masked_select(d))),
    Defect("roll", "per-sample gradients", lambda d: by_sample(*roll(d))),
    Defect("index_fill", "per-sample gradients", lambda d: by_sample(*index_fill(d))),
    Defect("select_scatter", "the gradient of a vmap", select_scatter),
    Defect("as_strided_scatter", "the gradient", as_strided_scatter),
    _of_jvp("det", torch.linalg.det),
    _of_jvp("slogdet", slogdet),
    _of_jvp("logdet", torch.logdet),
    *(_of_jvp(name, fn) for name, fn in matrix_examples.SOLVED.items()),
    *(_by_forward(name, fn) for name, fn in matrix_examples.BY_FORWARD.items()),
    Defect("cumprod", "a jvp of its jvp", jvp_twice),
    Defect("lu_solve", "a batch of batches", in_two_vmaps),
    Defect("sparse_coo_tensor", "the second derivative by its values", by_values),
    _over_reverse("cholesky_inverse", cholesky_inverse),
    _over_reverse("triangular_solve", triangular_solve),
    _over_reverse("scatter_reduce", scatter_reduce),
    *_of_norm("layer_norm", layer_norm),
    *_of_norm("batch_norm", batch_norm),
    *_of_norm("instance_norm", instance_norm),
]
