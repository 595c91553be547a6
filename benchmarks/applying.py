"""Gradients put to use: added to .grad, written there, clipped; against the foreach kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import gradkit
from benchmarks import models
from benchmarks.harness import Side, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

# Width and depth: 200 small tensors, and twenty megabytes of large ones.
_SIZES = {"200 params, 16 wide": (16, 100), "20 MB of params, 1024 wide": (1024, 5)}
_SMALL = {"4 params, 4 wide": (4, 2)}
_NORM = 0.5
_EPS = 1e-6  # of clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Contest:
    """A call, and the kernels that it cannot do without.

    Attributes:
        against: These, in words.
        sides: Makes both, for params and their gradients.
        limit: The target: the largest ratio, or None.
    """

    against: str
    sides: Callable[[dict[str, Tensor]], dict[str, Side]]
    limit: float | None


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each call and size."""
    for name, (width, depth) in (_SMALL if plan.quick else _SIZES).items():
        for what, contest in CONTESTS.items():
            model = models.mlp(width, depth).to(plan.device)
            both = contest.sides(dict(model.named_parameters()))
            timings = measure(both, plan.device, plan.effort)
            yield timed(
                f"{what}, {name}", contest.against, timings, theirs="raw", limit=contest.limit
            )


def _like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.randn_like(param) for name, param in params.items()}


def _adding(params: dict[str, Tensor]) -> dict[str, Side]:
    leaves = list(params.values())
    # Each side adds to tensors of its own, all of which stand in `.grad` while it does.
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)

    def raw(grads: dict[str, Tensor]) -> None:
        total = [leaf.grad for leaf in leaves if leaf.grad is not None]
        torch._foreach_add_(total, tuple(grads.values()))

    return {
        "gradkit": Side(lambda: _like(params), lambda grads: gradkit.add_grads_(params, grads)),
        "raw": Side(lambda: _like(params), raw),
    }


def _writing(params: dict[str, Tensor]) -> dict[str, Side]:
    leaves = list(params.values())

    def raw(grads: dict[str, Tensor]) -> None:
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()

    def build() -> dict[str, Tensor]:
        for leaf in leaves:
            leaf.grad = None
        return _like(params)

    return {
        "gradkit": Side(build, lambda grads: gradkit.write_grads_(params, grads)),
        "raw": Side(build, raw),
    }


def _clipping(params: dict[str, Tensor]) -> dict[str, Side]:
    def ours(grads: dict[str, Tensor]) -> object:
        return gradkit.tree.clip_by_global_norm(grads, _NORM)

    def raw(grads: dict[str, Tensor]) -> object:
        leaves = list(grads.values())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves)))
        factor = (_NORM / (norm + _EPS)).clamp(max=1.0)
        return dict(zip(grads, torch._foreach_mul(leaves, factor), strict=True)), norm

    return {"gradkit": Side(lambda: _like(params), ours), "raw": Side(lambda: _like(params), raw)}


def _clipping_in_place(params: dict[str, Tensor]) -> dict[str, Side]:
    leaves = list(params.values())

    def build() -> None:
        for leaf, grad in zip(leaves, _like(params).values(), strict=True):
            leaf.grad = grad

    return {
        "gradkit": _clipping(params)["gradkit"],
        "raw": Side(build, lambda _: clip_grad_norm_(leaves, _NORM)),
    }


CONTESTS = {
    "add_grads_": Contest("_foreach_add_ on the lists", _adding, 1.1),
    "write_grads_": Contest("a clone assigned to each .grad", _writing, 1.1),
    "tree.clip_by_global_norm": Contest("_foreach_norm and _foreach_mul", _clipping, 1.1),
    "tree.clip_by_global_norm, new tensors": Contest(
        "clip_grad_norm_, in place", _clipping_in_place, None
    ),
}
