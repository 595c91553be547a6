"""What there is around a call is read once, and the checks run in the order of their table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import multi_margin_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

import gradkit
from gradkit._checks import circumstances as c
from gradkit._checks import eager_graph
from gradkit._core import user_code
from gradkit._core.call import Call, Pass, read_losses
from gradkit._core.params import read_params
from tests.helpers import Halve


def call_of(
    losses: list[Tensor], params: list[Tensor], *, separate: bool = False, **options: Any
) -> Call:
    """Return a call, as the eager functions read it."""
    flat, opened = read_losses(losses, scalar=True), read_params(params)
    groups = [[i] for i in range(len(losses))] if separate else [range(len(losses))]
    return Call(flat, flat.leaves, [Pass(group, opened) for group in groups], **options)


@contextmanager
def new_process() -> Iterator[None]:
    """Let the process look as if other tests had left nothing alive."""
    with (
        patch.object(user_code._own_hooks, "count", RemovableHandle.next_id),
        patch.object(c, "recomputed_tensor_sources", {}),
    ):
        yield


def bits_of(call: Call) -> int:
    """Return what is around a call, but for what other tests of the process may have left."""
    call.functions = user_code.NONE_ALIVE
    return c.around(call) & ~(c.SHARDED | c.CHECKPOINTS | c.OBSERVED | c.WATCHED | c.CHECKED)


def leaf(device: torch.device) -> Tensor:
    return torch.ones(2, device=device, requires_grad=True)


def test_nothing_is_around_a_clean_call(device: torch.device) -> None:
    w = leaf(device)
    with new_process():
        assert bits_of(call_of([w.sum()], [w])) == 0
        assert bits_of(call_of([w.square().sum()], [w], create_graph=True)) == 0
        w.register_hook(lambda _: None)
        assert bits_of(call_of([w.sum()], [w])) == c.HOOKS


def of_call(device: torch.device) -> dict[int, Callable[[], Call]]:
    """Return a call around which there is a bit, and no other."""
    w = leaf(device)
    middle, view = w * 1, (w * 1)[:1]
    loss = w.square().sum()
    kept = loss * 1
    kept.retain_grad()
    twice = multi_margin_loss(torch.ones(2, 1, device=device) * w, torch.tensor([0, 1]).to(device))
    return {
        c.NO_VARIABLES: lambda: call_of([loss], [w.detach()]),
        0: lambda: call_of([middle.sum()], [middle]),
        c.CHANGED: lambda: call_of([view.sum()], [view]),
        c.CREATES_GRAPH: lambda: call_of([twice.sum()], [w], create_graph=True),
        c.MUST_REACH: lambda: call_of([loss], [w], unused="error"),
        c.SEVERAL_LOSSES: lambda: call_of([loss, kept.detach() * w.sum()], [w]),
        c.SEVERAL_LOSSES | c.SEVERAL_PASSES: lambda: call_of([loss, loss], [w], separate=True),
        c.RETAINED: lambda: call_of([kept], [w]),
    }


@pytest.mark.parametrize("bits", of_call(torch.device("cpu")))
def test_what_a_call_has_sets_its_bit(device: torch.device, bits: int) -> None:
    make = of_call(device)[bits]
    with new_process():
        assert bits_of(make()) == bits


def around_process(
    device: torch.device,
) -> dict[int, tuple[Callable[[], object], AbstractContextManager[object]]]:
    """Return what is kept alive, and entered, so that a bit of the process is set."""
    w = leaf(device)
    return {
        c.HOOKS: (lambda: w.register_hook(lambda _: None), nullcontext()),
        c.FUNCTIONS: (lambda: Halve.apply(w, w), nullcontext()),
        c.INCOMPLETE: (lambda: checkpoint(torch.sin, w, use_reentrant=True), nullcontext()),
        c.CHECKPOINTS: (lambda: checkpoint(torch.sin, w, use_reentrant=False), nullcontext()),
        c.OBSERVED: (lambda: None, gradkit.safe_retain(w * 1)),
        c.CHECKED | c.WATCHED: (lambda: None, gradkit.checked()),
    }


@pytest.mark.parametrize("bits", around_process(torch.device("cpu")))
def test_what_is_in_the_process_sets_its_bit(device: torch.device, bits: int) -> None:
    make, context = around_process(device)[bits]
    w = leaf(device)
    kept = make()
    # safe_retain would say that no pass ran inside.
    with warnings.catch_warnings(action="ignore"), context:
        assert c.around(call_of([w.sum()], [w])) & bits == bits
    del kept


def test_the_order_of_the_checks(device: torch.device) -> None:
    names = [check.__name__.strip("_") for _, check in eager_graph._BEFORE]
    assert names == [
        "refuse_no_variables",
        "refuse_hooked_leaf_losses",
        "refuse_gathered",
        "refuse_wrong_derivatives",
        "refuse_inside_transforms",
        "refuse_checkpoints",
        "refuse_special_points",
        "refuse_incomplete",
        "refuse_unreached_views_and_subclasses",
        "refuse_compiled_together",
        "refuse_unreached",
        "refuse_other_tensors",
        "refuse_freed",
    ]


def test_the_first_of_several_refusals_is_raised(device: torch.device) -> None:
    """Of what is freed, wrong twice and unreached, a variable that is missing comes first."""
    v = torch.randn(4, 3, device=device, requires_grad=True)
    loss = multi_margin_loss(v, torch.tensor([0, 1, 2, 0], device=device)).square().sum()
    torch.autograd.grad(loss, v)
    frozen = v.detach()
    unreached = leaf(device)
    with pytest.raises(gradkit.UnreachedParamError, match="no tensor there requires grad"):
        gradkit.value_and_grads([loss, loss], [frozen], create_graph=True, unused="error")
    with pytest.raises(gradkit.UnsupportedGraphError, match="multi_margin_loss"):
        gradkit.value_and_grads([loss, loss], [v, unreached], create_graph=True, unused="error")
    with pytest.raises(gradkit.UnreachedParamError, match=r"params\[1\]"):
        gradkit.value_and_grads([loss, loss], [v, unreached], unused="error")
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.value_and_grads([loss, loss], [v])
