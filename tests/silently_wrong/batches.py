"""torch.func.vmap, and what is built on it: jacrev, per-sample gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

import gradkit
from gradkit import func
from tests.silently_wrong._row import Case, D, Row
from tests.sweep import defects


def _rows(fn: Callable[[Tensor], Tensor], x: Tensor) -> Case:
    """The gradient of the last element, from all rows in one batch."""

    def ours() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            return func.per_loss_grads(fn, chunk_size=2)(x)[-1]

    return Case(*defects.last_of_batch(fn, x), ours)


def cdist_by_rows(device: torch.device) -> Case:
    return _rows(*defects.cdist(device))


@torch.jit.script
def _distances(x: Tensor, other: Tensor) -> Tensor:
    return torch.cdist(x, other).sum(1)


def scripted_cdist_by_rows(device: torch.device) -> Case:
    other = torch.tensor([[0.0, 3.0], [4.0, 0.0]], device=device)
    x = torch.tensor([[0.0, 0.0], [4.0, 3.0]], device=device)
    return _rows(lambda x: _distances(x, other), x)


def masked_select_by_rows(device: torch.device) -> Case:
    return _rows(*defects.masked_select(device))


def _samples(fn: Callable[[Tensor], Tensor], x: Tensor, way: Callable[[Tensor], Tensor]) -> Case:
    """The gradient by each sample, in one batch; and that of the same function in other words."""
    return Case(
        *defects.by_sample(fn, x),
        lambda: func.per_sample_grads(fn, in_dims=0)(x),
        lambda: func.per_sample_grads(way, in_dims=0)(x),
    )


def roll_by_samples(device: torch.device) -> Case:
    return _samples(*defects.roll(device), lambda x: x * x)


def index_fill_by_samples(device: torch.device) -> Case:
    ones = torch.ones(3, dtype=D, device=device)
    first = torch.arange(3, device=device) == 0
    return _samples(
        *defects.index_fill(device), lambda x: torch.where(first, x, ones).square().sum()
    )


def select_scatter_by_samples(device: torch.device) -> Case:
    zeros = torch.zeros(2, 2, dtype=D, device=device)
    x = torch.tensor([1.0, 2.0], dtype=D, device=device)
    cubes = defects.scattered_cubes
    return Case(
        *defects.select_scatter(device),
        lambda: func.value_and_grads(lambda x: vmap(cubes)(zeros, x).sum())(x),
        lambda: func.per_sample_grads(cubes, 1, in_dims=0)(zeros, x),
    )


REFUSED = gradkit.UnsupportedGraphError
ROWS = [
    Row(
        "`jacrev(lambda x: torch.cdist(x, other).sum(1))(x)`: the last row",
        [[-1.0, -1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]],
        "`func.per_loss_grads`, in a loop", cdist_by_rows,
    ),
    Row(
        "the same, with the function compiled by `torch.jit.script`",
        [[-1.0, -1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]],
        "`func.per_loss_grads`, in a loop", scripted_cdist_by_rows,
    ),
    Row(
        "`jacrev(lambda x: torch.masked_select(x, mask))(x)`, where `mask` has more dimensions "
        "than `x`: the last row",
        [0.0, 0.0], [0.0, 1.0],
        "`func.per_loss_grads`, in a loop", masked_select_by_rows,
    ),
    Row(
        "`vmap(grad(lambda x: torch.roll(x, 1) * x))`, where each sample is 0-dimensional",
        [5.0, 4.0, 3.0], [2.0, 4.0, 6.0],
        "`func.per_sample_grads`", roll_by_samples, REFUSED, "without the `roll`",
    ),
    Row(
        "`vmap(grad(lambda x: ones.index_fill(0, zero, x).square().sum()))` at `[10, 20]`",
        [40.0, 40.0], [20.0, 40.0],
        "`func.per_sample_grads`", index_fill_by_samples, REFUSED, "with `torch.where`",
    ),
    Row(
        "`grad` of a sum over `vmap(lambda x: (row.select_scatter(x, 0, 1) ** 3).sum())`",
        [6.0, 24.0], [3.0, 12.0],
        "`func.value_and_grads`", select_scatter_by_samples, REFUSED, "`func.per_sample_grads`",
    ),
]  # fmt: skip
