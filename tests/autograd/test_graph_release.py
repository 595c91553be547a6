"""How long a graph lives, what is left of it after an error, and FreedGraphError."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradkit
from gradkit._autograd.release import release
from gradkit._core import graph
from tests.helpers import assert_same_bits, same_bits, unchanged
from tests.strategies import HOOKLESS, Program, build, programs

# But for CopySlices, from which Python cannot take what it holds.
RELEASABLE = tuple(op for op in HOOKLESS if op != "in_place_view")


# The first of its losses has saved what only the second leaf needs.
LEADS_ELSEWHERE = Program(
    seed=0,
    leaves=("plain", "plain"),
    ops=(("add", 0, 0), ("tanh", 1, 0), ("add", 2, 3)),
    losses=(("sum", 4), ("sum", 2)),
)


class Saves(torch.autograd.Function):
    """A square that saves a tensor of its own making, so that its life can be watched."""

    last: weakref.ref[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = x * 2
        Saves.last = weakref.ref(own)
        ctx.save_for_backward(own)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (own,) = ctx.saved_tensors
        return grad * own


def watched_square(x: Tensor) -> tuple[Tensor, weakref.ref[Tensor]]:
    y = Saves.apply(x)
    return y, Saves.last


def is_freed(loss: Tensor, *params: Tensor) -> bool:
    try:
        torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "second time" in str(error):
            return True
        raise
    return False


def test_the_graph_is_freed_after_the_pass_and_kept_if_asked_for(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    loss = (w * w).sum()
    gradkit.value_and_grads(loss, w, retain_graph=True)
    assert not is_freed(loss, w)
    gradkit.value_and_grads(loss, w, create_graph=True)
    assert not is_freed(loss, w)
    gradkit.value_and_grads(loss, w)
    assert is_freed(loss, w)


@example(program=LEADS_ELSEWHERE, chosen={0})
@given(program=programs(ops=RELEASABLE, leaf_hooks=False), chosen=st.sets(st.integers(0, 7)))
def test_separate_passes_free_what_one_pass_does(
    device: torch.device, program: Program, chosen: set[int]
) -> None:
    """For all losses, and some leaves or values: what leads to none of them is kept."""
    ours, theirs = (build(program, device, torch.float64) for _ in range(2))
    mine, torchs = (
        [x for index, x in enumerate(one.values) if index in chosen and x.requires_grad]
        for one in (ours, theirs)
    )
    differentiable = [loss for loss in theirs.losses if loss.requires_grad]
    assume(torchs and differentiable)
    if all(g is None for g in torch.autograd.grad(differentiable, torchs, allow_unused=True)):
        return
    gradkit.per_loss_grads(ours.losses, mine)
    for value, other in zip(
        (*ours.values, *ours.losses), (*theirs.values, *theirs.losses), strict=True
    ):
        if value.requires_grad:
            freed = [is_freed(value.sum(), leaf) for leaf in ours.leaves]
            assert freed == [is_freed(other.sum(), leaf) for leaf in theirs.leaves]


def test_every_part_is_freed_with_its_last_pass(device: torch.device) -> None:
    """A loop that retains all but the last pass leaves the heads of the other losses [E4]."""
    w = torch.randn(3, device=device, requires_grad=True)
    heads = [torch.randn(3, device=device, requires_grad=True) for _ in range(3)]
    trunk, trunk_saved = watched_square(w)
    losses, saved = [], []
    for head in heads:
        top, ref = watched_square(trunk * head)
        losses.append(top.sum())
        saved.append(ref)
        del top
    alive_at = []
    for loss in losses:
        loss.register_hook(
            lambda _: alive_at.append([
                trunk_saved() is not None,
                *(r() is not None for r in saved),
            ])
        )
    per_loss = gradkit.per_loss_grads(losses, [w, *heads])
    assert alive_at == [
        [True, True, True, True],
        [True, False, True, True],
        [True, False, False, True],
    ]
    gc.collect()
    assert trunk_saved() is None
    assert all(ref() is None for ref in saved)
    for index, loss in enumerate(losses):
        assert is_freed(loss, w, heads[index])
        assert per_loss[index][0] is not None


def test_independent_losses_are_freed_one_by_one(device: torch.device) -> None:
    ws = [torch.randn(3, device=device, requires_grad=True) for _ in range(2)]
    tops = [watched_square(w) for w in ws]
    losses = [top.sum() for top, _ in tops]
    second_pass = []
    losses[1].register_hook(lambda _: second_pass.append(tops[0][1]() is None))
    gradkit.per_loss_grads(losses, ws)
    assert second_pass == [True]
    assert tops[1][1]() is None


def test_a_last_loss_that_reaches_nothing_does_not_keep_the_graph(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    first, second = (w * w).sum(), (v * v).sum()
    grads = gradkit.per_loss_grads([first, second], [w])
    assert grads[1] == [None]
    assert is_freed(first, w)
    assert not is_freed(second, v)  # no pass went there


def test_simultaneous_grads_free_what_each_player_used(device: torch.device) -> None:
    g, d = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    fake, fake_saved = watched_square(g)
    judged, judged_saved = watched_square(fake * d)
    real, real_saved = watched_square(d * 2)
    losses = {"G": -judged.sum(), "D": judged.sum() - real.sum()}
    del judged, real
    gradkit.simultaneous_grads(losses, {"G": g, "D": d})
    gc.collect()
    assert fake_saved() is None
    assert judged_saved() is None
    assert real_saved() is None


def test_retained_parts_stay(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    trunk = w * w
    losses = [(trunk * trunk).sum(), trunk.exp().sum()]
    first = gradkit.per_loss_grads(losses, w, retain_graph=True)
    second = gradkit.per_loss_grads(losses, w)
    assert_same_bits(first, second)
    assert is_freed(losses[0], w)
    assert is_freed(losses[1], w)


def test_saved_tensors_with_hooks_of_their_own_are_let_be(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        trunk = w * w
        losses = [(trunk * trunk).sum(), trunk.exp().sum()]
    expected = [torch.autograd.grad(loss, w, retain_graph=True)[0] for loss in losses]
    assert_same_bits(gradkit.per_loss_grads(losses, w), expected)


def test_a_second_call_says_which_loss_and_what_to_call(device: torch.device) -> None:
    model = nn.Linear(3, 2).to(device)
    h = model(torch.randn(4, 3, device=device)).tanh()
    losses = {"first": h.square().sum(), "second": h.exp().sum()}
    gradkit.value_and_grads(losses["first"], model)
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
        with (
            unchanged(*model.parameters()),
            pytest.raises(gradkit.FreedGraphError, match=r"losses\['first'\].*\n.*per_loss_grads"),
        ):
            call(losses, model)
        with pytest.raises(gradkit.FreedGraphError, match=r"(?s)losses.*per_loss_grads"):
            call(losses["second"], model)  # shares the trunk


@pytest.mark.parametrize("strategy", ["sequential", "batched"])
def test_a_vector_of_losses_through_a_freed_graph(device: torch.device, strategy: str) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    trunk = w * w
    trunk.sum().backward()
    before = w.grad.clone()
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.per_loss_grads(trunk * 2, w, strategy=strategy)
    assert same_bits(w.grad, before)


def test_a_loss_that_was_differentiated_is_refused_before_another_is_freed(
    device: torch.device,
) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    old, new = (w * w).exp().sum(), (w * w).exp().sum()
    old.backward()
    with unchanged(w, old, new), pytest.raises(gradkit.FreedGraphError, match=r"losses\['old'\]"):
        gradkit.value_and_grads({"old": old, "new": new}, w)
    assert not is_freed(new, w)


def test_a_freed_part_that_is_not_needed_is_no_obstacle(device: torch.device) -> None:
    w, v = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
    spent = (v * v).sum()
    spent.backward()
    _, grads = gradkit.value_and_grads(spent + (w * w).sum(), {"w": w})
    assert torch.equal(grads["w"], 2 * w.detach())
    per_loss = gradkit.per_loss_grads({"spent": spent, "new": (w * w).sum()}, {"w": w})
    assert per_loss["spent"] == {"w": None}
    y = w * w
    y.sum().backward()
    assert torch.equal(gradkit.value_and_grads(y.sum(), y)[1], torch.ones(3, device=device))


def test_a_checkpoint_run_twice(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    w = torch.randn(3, device=device, requires_grad=True)
    loss = checkpoint(lambda w: (w * w).exp(), w, use_reentrant=False).sum()
    gradkit.value_and_grads(loss, w)
    with pytest.raises(gradkit.FreedGraphError):
        gradkit.value_and_grads(loss, w)


@pytest.mark.parametrize("call", [gradkit.value_and_grads, gradkit.per_loss_grads])
def test_an_exception_in_a_hook_leaves_everything_alone(device: torch.device, call: Any) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    w.grad = torch.ones_like(w)
    y = w * w
    y.retain_grad()
    loss = y.exp().sum()

    def fail(grad: Tensor) -> None:
        raise KeyError("in a hook")

    handle = y.register_hook(fail)
    with unchanged(w, y, loss), pytest.raises(KeyError, match="in a hook"):
        call([loss, loss * 2], [w, y], retain_graph=True)
    handle.remove()
    call([loss, loss * 2], [w, y])  # and, since it was retained, the graph is usable


def test_retain_grad_of_the_user_is_put_back(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    y = w * w
    y.retain_grad()
    loss = y.sum()
    loss.retain_grad()
    loss.backward(retain_graph=True)
    for params in ([w, y], [y]):
        with unchanged(w, y, loss):
            gradkit.value_and_grads(loss, params, retain_graph=True)
            gradkit.per_loss_grads(loss, params, retain_graph=True)
    with unchanged(w, y, loss), gradkit.safe_retain(y):
        gradkit.value_and_grads(loss, w, retain_graph=True)


def test_no_memory_grows_over_many_calls(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    refs = []
    for _ in range(20):
        top, ref = watched_square(w)
        grads = gradkit.per_loss_grads([top.sum(), (top * 2).sum()], w)
        refs += [ref, weakref.ref(top), *(weakref.ref(grad) for grad in grads)]
        del top, grads
    assert all(ref() is None for ref in refs)


def test_what_gradkit_has_freed_is_refused_before_another_is(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    trunk = w * w
    old, last = (trunk * trunk).exp().sum(), trunk.exp().sum()
    gradkit.per_loss_grads([old, last], w)
    new = (w * w).exp().sum()
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
        with pytest.raises(gradkit.FreedGraphError, match=r"^losses\['old'\]:"):
            call({"new": new, "old": old}, w)
    assert not is_freed(new, w)


def test_a_freed_trunk_is_refused_before_another_is_freed(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    trunk = w * w
    trunk.sum().backward()
    new = (w * w).exp().sum()
    with pytest.raises(gradkit.FreedGraphError, match=r"^losses\['old'\]:"):
        gradkit.per_loss_grads({"new": new, "old": trunk.exp().sum()}, w)
    assert not is_freed(new, w)


def test_looking_for_freed_tensors_does_not_run_a_checkpoint(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    w = torch.randn(3, device=device, requires_grad=True)
    runs: list[int] = []

    def part(w: Tensor) -> Tensor:
        runs.append(1)
        return (w * w).exp()

    losses = [checkpoint(part, w, use_reentrant=False).sum() for _ in range(2)]
    assert len(runs) == 2
    with pytest.raises(gradkit.UnreachedParamError):
        gradkit.per_loss_grads(losses, [w, torch.ones(1, requires_grad=True)], unused="error")
    assert len(runs) == 2
    gradkit.per_loss_grads(losses, w)
    assert len(runs) == 4


def test_a_last_loss_without_elements_keeps_nothing(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    trunk, saved = watched_square(w)
    first, empty = trunk.exp().sum(), trunk[:0]
    grads = gradkit.per_loss_grads([first, empty], w)
    assert grads[1].shape == (0, 3)
    assert saved() is None


def test_kept_tensors_and_a_game(device: torch.device) -> None:
    g, d, x = (torch.randn(3, device=device, requires_grad=True) for _ in range(3))
    shared = (x * x).exp()  # only what is kept needs it
    losses = {"G": (shared * g * d).sum(), "D": (shared * g * d * d).sum()}
    expected = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses.values()]
    with gradkit.safe_retain(x) as kept:
        gradkit.simultaneous_grads(losses, {"G": g, "D": d})
    assert_same_bits(kept.passes, expected)


def test_releasing_a_node_twice_does_nothing(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    y = Saves.apply((w * w).exp())
    nodes = graph.nodes_below([y.sum()])
    for _ in range(2):
        release(nodes)
    with pytest.raises(gradkit.FreedGraphError, match="earlier gradkit call"):
        torch.autograd.grad(y.sum(), w)
