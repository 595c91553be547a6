"""No path of a leaf is written before an error needs it: each takes as long as the whole tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit._core import pytree

Params = dict[str, Tensor]


def loss_of(params: Params, scale: Any = 1.0) -> Tensor:
    return torch.stack([(p**3).sum() for p in params.values()]).sum() * scale


def rows_of(params: Params) -> Tensor:
    return torch.stack([(p**2).sum() for p in params.values()])


def losses_of(params: Params) -> Params:
    return {"cubes": loss_of(params), "squares": rows_of(params).sum()}


def in_step(params: Params) -> None:
    _, grads = gradkit.value_and_grads(loss_of(params), params)
    gradkit.step_(torch.optim.Adam(params.values()), params, grads)


def through_grad(params: Params) -> None:
    _, grads = gradkit.value_and_grads(loss_of(params), params)
    gradkit.write_grads_(params, grads)
    gradkit.add_grads_(params, grads)
    gradkit.read_grads(params)
    gradkit.clear_grads_(params)


def in_a_block(params: Params) -> None:
    with gradkit.capture_grads(params):
        loss_of(params).backward()
    doubled = {name: 2 * p for name, p in params.items()}
    with gradkit.safe_retain(doubled):
        loss_of(doubled).backward()
    gradkit.backward_(loss_of(params), params)


def pulled(params: Params) -> None:
    values, pull = gradkit.func.vjp(losses_of, params)
    pull(gradkit.tree.map(torch.ones_like, values))


def implicitly(params: Params) -> None:
    fixed = {name: p.detach() for name, p in params.items()}

    def inner(w: Params, scale: Tensor) -> Tensor:
        return torch.stack([(w[name] - scale * fixed[name]).square().sum() for name in w]).sum()

    def solver(w: Params, scale: Tensor) -> Params:
        return {name: (scale * fixed[name]).detach() for name in w}

    scale = torch.ones((), device=next(iter(params.values())).device, requires_grad=True)
    found = gradkit.meta.implicit(solver, inner)(params, scale)
    gradkit.value_and_grads(rows_of(found).sum(), scale)


def arithmetic(params: Params) -> None:
    grads = {name: p.detach() for name, p in params.items()}
    for call in (gradkit.tree.add, gradkit.tree.sub, gradkit.tree.dot, gradkit.tree.cosine):
        call(grads, grads)
    gradkit.tree.clip_by_global_norm(grads, 1.0)
    gradkit.tree.add_(gradkit.tree.map(torch.clone, grads), grads)
    gradkit.tree.gram([grads, grads])


eager = gradkit.value_and_grads
CALLS: dict[str, Callable[[Params], Any]] = {
    "value_and_grads": lambda p: eager(losses_of(p), p, weights={"cubes": 1.0, "squares": 2.0}),
    "value_and_grads, create_graph": lambda p: eager(losses_of(p), p, create_graph=True),
    "value_and_grads, error": lambda p: eager(losses_of(p), p, unused="error"),
    "per_loss_grads": lambda p: gradkit.per_loss_grads(losses_of(p), p),
    "per_loss_grads, create_graph": lambda p: gradkit.per_loss_grads(
        losses_of(p), p, create_graph=True
    ),
    "per_loss_grads, batched": lambda p: gradkit.per_loss_grads(rows_of(p), p, strategy="batched"),
    "simultaneous_grads": lambda p: gradkit.simultaneous_grads(
        losses_of(p), {"cubes": p, "squares": p}
    ),
    "vjp": lambda p: gradkit.vjp(rows_of(p), p, torch.ones_like(rows_of(p))),
    "combine": lambda p: gradkit.combine(gradkit.per_loss_grads(losses_of(p), p), torch.ones(2)),
    "gram": lambda p: gradkit.gram(losses_of(p), p),
    "per_loss_norms": lambda p: gradkit.per_loss_norms(losses_of(p), p),
    "per_sample_norms": lambda p: gradkit.per_sample_norms(rows_of(p), p),
    "clipped_sum": lambda p: gradkit.clipped_sum(rows_of(p), p, 1.0),
    "value_and_reduced_grads": lambda p: gradkit.value_and_reduced_grads(loss_of(p), p, Tensor.sum),
    "step_": in_step,
    "write_grads_ and add_grads_": through_grad,
    "capture_grads, safe_retain, backward_": in_a_block,
    "func.value_and_grads": lambda p: gradkit.func.value_and_grads(loss_of)(p),
    "func.per_loss_grads": lambda p: gradkit.func.per_loss_grads(losses_of)(p),
    "func.per_sample_grads": lambda p: gradkit.func.per_sample_grads(loss_of)(
        p, torch.ones(2, device=next(iter(p.values())).device)
    ),
    "func.hvp": lambda p: gradkit.func.hvp(loss_of, p, p),
    "func.jvp": lambda p: gradkit.func.jvp(losses_of, (p,), (p,)),
    "func.vjp": pulled,
    "meta.unroll": lambda p: gradkit.meta.unroll(
        lambda w, _, batch: loss_of(w), p, [0, 1], gradkit.meta.adam(0.1)
    ),
    "meta.implicit": implicitly,
    "tree": arithmetic,
}


class Identity(torch.autograd.Function):
    """A Function of the user's, in the presence of which graphs are looked at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("beside_user_code", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_returns_writes_no_path(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, beside_user_code: bool
) -> None:
    alive = []
    if beside_user_code:
        leaf = torch.ones(1, device=device, requires_grad=True)
        leaf.register_hook(lambda grad: None)
        alive.append(Identity.apply(leaf))

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("a path was written")

    make = partial(torch.randn, 3, device=device)
    params: Params = {key: nn.Parameter(make()) for key in "abc"}
    monkeypatch.setattr(pytree, "path", refuse)
    CALLS[name](params)
    assert len(alive) == beside_user_code
