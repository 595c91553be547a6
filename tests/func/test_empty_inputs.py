"""Losses of nothing: every loss function and reduction, over tensors without elements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gradkit
from gradkit import func

pytestmark = [  # of torch
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
]
D = torch.float64
Loss = Callable[..., Tensor]


def like(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=D, device=x.device)


def classes(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.long, device=x.device)


LOSSES: dict[str, Loss] = {
    **{
        name: lambda x, name=name, **options: getattr(functional, name)(x, like(x), **options)
        for name in (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss",
            "binary_cross_entropy_with_logits", "hinge_embedding_loss", "soft_margin_loss",
            "multilabel_soft_margin_loss", "cross_entropy",
        )
    },
    **{
        name: lambda x, name=name, **options: getattr(functional, name)(
            x, like(x), like(x), **options
        )
        for name in (
            "gaussian_nll_loss", "margin_ranking_loss", "triplet_margin_loss",
            "triplet_margin_with_distance_loss",
        )
    },
    "binary_cross_entropy": lambda x, **options: functional.binary_cross_entropy(
        x.sigmoid(), like(x), **options
    ),
    "cosine_embedding_loss": lambda x, **options: functional.cosine_embedding_loss(
        x, like(x), like(x)[:, :1].sum(1) + 1, **options
    ),
    "nll_loss": lambda x, **options: functional.nll_loss(x, classes(x), **options),
    "multi_margin_loss": lambda x, **options: functional.multi_margin_loss(
        x, classes(x), **options
    ),
    "multilabel_margin_loss": lambda x, **options: functional.multilabel_margin_loss(
        x, torch.zeros(x.shape, dtype=torch.long, device=x.device), **options
    ),
    "mse_loss by position": lambda x, reduction: functional.mse_loss(
        x, like(x), None, None, reduction
    ),
}  # fmt: skip


def rows(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    """Return a loss for each of `w`, to each of which the loss of nothing is added."""
    return w.square() + loss(x + w.sum()).sum()


def sample(loss: Loss, w: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return scale * rows(loss, x, w).sum()


def plain(loss: Loss, x: Tensor, w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.stack([
        torch.autograd.grad(row, w, retain_graph=True)[0] for row in rows(loss, x, w)
    ])


CALLS: dict[str, Callable[[Loss, Tensor, Tensor], Any]] = {
    "value_and_grads": lambda loss, x, w: func.value_and_grads(lambda w: rows(loss, x, w).sum())(w)[
        1
    ],
    "per_loss_grads": lambda loss, x, w: func.per_loss_grads(partial(rows, loss, x))(w).sum(0),
    "in chunks": lambda loss, x, w: func.per_loss_grads(partial(rows, loss, x), chunk_size=2)(
        w
    ).sum(0),
    "per_sample_grads": lambda loss, x, w: func.per_sample_grads(
        partial(sample, loss), in_dims=(None, None, 0)
    )(w, x, torch.tensor([0.25, 0.75], dtype=D, device=w.device)).sum(0),
    "of empty samples": lambda loss, x, w: func.per_sample_grads(
        partial(sample, loss), in_dims=(None, 0, 0), chunk_size=1
    )(w, torch.stack([x, x]), torch.tensor([0.25, 0.75], dtype=D, device=w.device)).sum(0),
    "gram": lambda loss, x, w: gradkit.gram(
        rows(loss, x, leaf := w.clone().requires_grad_()), leaf
    ),
    "batched": lambda loss, x, w: gradkit.per_loss_grads(
        rows(loss, x, leaf := w.clone().requires_grad_()), leaf, strategy="batched"
    ).sum(0),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_nothing_adds_nothing(device: torch.device, name: str, reduction: str) -> None:
    """torch divides by the number of elements in Python in some batched backward passes."""
    loss: Loss = partial(LOSSES[name], reduction=reduction)
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)
    for shape in ((0, 3), (2, 0), (0, 0)):
        x = torch.zeros(shape, dtype=D, device=device)
        try:
            expected = plain(loss, x, w)
        except (RuntimeError, IndexError):
            continue  # torch has no such loss of this shape
        for called, call in CALLS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", gradkit.GradkitWarning)  # of a fallback
                got = call(loss, x, w)
            right = expected @ expected.T if called == "gram" else expected.sum(0)
            torch.testing.assert_close(got, right, msg=f"{called} over {shape}")


def test_a_division_by_zero_of_the_function_itself_stays(device: torch.device) -> None:
    def broken(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum() * (1 / (len(w) - 3))

    x = torch.ones(2, 3, device=device)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        func.per_sample_grads(broken, in_dims=(None, 0))(x[0], x)
