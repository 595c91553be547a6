"""Pre-hooks of a leaf's AccumulateGrad node: refused, and looked for no more often than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

import gradkit
from gradkit._core import user_code
from tests.helpers import unchanged

CALLS: dict[str, Callable[[Tensor, Any], object]] = {
    "value_and_grads": gradkit.value_and_grads,
    "per_loss_grads": lambda loss, params: gradkit.per_loss_grads([loss, 2 * loss], params),
    "batched": lambda loss, params: gradkit.per_loss_grads(
        loss.expand(3), params, strategy="batched"
    ),
    "simultaneous_grads": lambda loss, params: gradkit.simultaneous_grads(
        {"v": loss, "w": 2 * loss}, params
    ),
    "value_and_reduced_grads": lambda loss, params: gradkit.value_and_reduced_grads(
        loss, params, torch.sum
    ),
    "vjp": lambda loss, params: gradkit.vjp(loss, params, torch.ones_like(loss)),
    "gram": lambda loss, params: gradkit.gram([loss, 2 * loss], params),
    "per_loss_norms": gradkit.per_loss_norms,
    "per_sample_norms": lambda loss, params: gradkit.per_sample_norms(loss.expand(3), params),
    "clipped_sum": lambda loss, params: gradkit.clipped_sum(loss.expand(3), params, 1.0),
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes that are looked at."""
    seen: list[Node] = []
    look = user_code._first_with_hooks

    def seen_by(nodes: Sequence[Node]) -> int | None:
        seen.extend(nodes)
        return look(nodes)

    monkeypatch.setattr(user_code, "_first_with_hooks", seen_by)
    return seen


def leaves(device: torch.device) -> dict[str, Tensor]:
    return {name: torch.ones(2, device=device, requires_grad=True) for name in ("v", "w")}


def product(params: dict[str, Tensor]) -> Tensor:
    return (3 * params["v"] * params["w"]).sum()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused_before_anything_has_run(
    device: torch.device, name: str, checked: bool
) -> None:
    params = leaves(device)
    loss = product(params)
    handle = get_gradient_edge(params["w"]).node.register_prehook(lambda grads: None)
    made = user_code.hooks_made()
    match = r"\['w'\].*pre-hook of its AccumulateGrad node"
    with gradkit.checked() if checked else nullcontext():
        with unchanged(*params.values()), pytest.raises(gradkit.UnsupportedGraphError, match=match):
            CALLS[name](loss, params)
        handle.remove()
        assert user_code.hooks_made() == made  # a look is none of the hooks that make calls slower
        _, grads = gradkit.value_and_grads(loss, params)
    assert grads["w"].tolist() == [3, 3]


def test_one_that_is_registered_between_two_calls_is_seen(device: torch.device) -> None:
    params = leaves(device)
    torch.nn.Identity().register_forward_hook(lambda *_: None)
    loss = product(params)
    gradkit.value_and_grads(loss, params, retain_graph=True)
    get_gradient_edge(params["v"]).node.register_prehook(lambda grads: None)
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"params\['v'\].*pre-hook"):
        gradkit.value_and_grads(loss, params)


def test_backward_runs_it(device: torch.device) -> None:
    params = leaves(device)
    loss = product(params)
    get_gradient_edge(params["w"]).node.register_prehook(lambda grads: (10 * grads[0],))
    gradkit.backward_(loss, params)
    assert params["w"].grad is not None
    assert params["w"].grad.tolist() == [30, 30]


def test_a_leaf_is_looked_at_once_for_each_count_of_hooks(
    device: torch.device, looks: list[Node]
) -> None:
    params = leaves(device)
    for expected in (2, 4):
        torch.nn.Identity().register_forward_hook(lambda *_: None)
        for _ in range(3):
            gradkit.value_and_grads(product(params), params)
        assert len(looks) == expected


def test_without_any_hook_in_the_process_nothing_is_looked_at(
    device: torch.device, looks: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code._own_hooks, "count", torch.utils.hooks.RemovableHandle.next_id)
    params = leaves(device)
    gradkit.value_and_grads(product(params), params)
    assert not looks
