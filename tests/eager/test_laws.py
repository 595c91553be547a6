"""The laws of the eager calls, over random graphs; plain torch is the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import gradkit
from gradkit._autograd.passes import PassRunner
from gradkit._core import user_code
from tests.helpers import World, assert_owned, assert_same_bits, writes_on_copies
from tests.strategies import HOOKLESS, OPS, WRITING, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
BATCH = PassRunner.batched_grads


def reaches(program: Program, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether any loss of the program reaches any leaf, by torch's account."""
    graph = build(program, device, dtype)
    grads = torch.autograd.grad(
        graph.losses,
        graph.leaves,
        allow_unused=True,
        grad_outputs=[torch.ones_like(loss) for loss in graph.losses],
    )
    return any(grad is not None for grad in grads)


def assert_refused(call: Callable[[], object]) -> None:
    """That it says that nothing is reached."""
    with pytest.raises(gradkit.UnreachedParamError):
        call()


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_one_joint_pass_is_backward_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    """Or an error, if a hook or a Function has written on a gradient; never inside `checked`."""
    theirs = build(program, device, dtype)
    torch.autograd.backward(theirs.losses)
    expected = [leaf.grad for leaf in theirs.leaves]
    ours = build(program, device, dtype)
    if all(grad is None for grad in expected):
        assert_refused(lambda: gradkit.value_and_grads(ours.losses, ours.leaves))
        return
    try:
        values, grads = gradkit.value_and_grads(ours.losses, ours.leaves)
    except gradkit.UnsupportedGraphError as caught:
        error = str(caught)
    else:
        error = ""
    if error:
        assert any(name in WRITING for name, _, _ in program.ops), error
        assert "written in place" in error
        assert all(leaf.grad is None for leaf in ours.leaves)
        ours = build(program, device, dtype)
        with gradkit.checked(), warnings.catch_warnings():
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            values, grads = gradkit.value_and_grads(ours.losses, ours.leaves)
        with writes_on_copies():  # .backward() may be spoilt as well
            theirs = build(program, device, dtype)
            torch.autograd.backward(theirs.losses)
        expected = [leaf.grad for leaf in theirs.leaves]
    assert_same_bits(grads, expected)
    assert_same_bits(values, theirs.losses)
    assert_owned(grads, ours.leaves)
    for grad, theirs_grad in zip(grads, expected, strict=True):
        assert grad is None or grad.stride() == theirs_grad.stride()


@given(program=programs(ops=HOOKLESS, leaf_hooks=False), dtype=dtypes)
def test_without_a_hook_in_the_process_nothing_is_different(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    """The shortcut of ordinary programs: no copy where no hook could have kept or changed one."""
    assume(reaches(program, device, dtype))
    theirs, ours = build(program, device, dtype), build(program, device, dtype)
    torch.autograd.backward(theirs.losses, retain_graph=True)
    expected = [leaf.grad for leaf in theirs.leaves]
    with patch.object(user_code, "hooks_registered", return_value=False):
        values, grads = gradkit.value_and_grads(ours.losses, ours.leaves, retain_graph=True)
        per_loss = gradkit.per_loss_grads(ours.losses, ours.leaves, retain_graph=True)
    assert_same_bits(grads, expected)
    assert_owned([*grads, *values], [*ours.leaves, *ours.losses])
    world = World(*ours.leaves, *ours.losses)
    for index, loss in enumerate(theirs.losses):
        row = torch.autograd.grad(loss, theirs.leaves, retain_graph=True, allow_unused=True)
        shaped = [None if g is None else g.reshape(loss.shape + g.shape) for g in row]
        assert_same_bits(per_loss[index], shaped)
    for grad in (*grads, *(g for row in per_loss for g in row)):
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()
    _, again = gradkit.value_and_grads(ours.losses, ours.leaves)
    assert_same_bits(again, expected)


@given(program=programs(), weights=st.lists(st.floats(-3, 3), min_size=4, max_size=4), dtype=dtypes)
def test_weights_are_the_cotangents_of_backward(
    device: torch.device, program: Program, weights: list[float], dtype: torch.dtype
) -> None:
    theirs = build(program, device, dtype)
    weights = weights[: len(theirs.losses)]
    seeds = [torch.full_like(loss, w) for loss, w in zip(theirs.losses, weights, strict=True)]
    torch.autograd.backward(theirs.losses, seeds)
    expected = [leaf.grad for leaf in theirs.leaves]
    assume(any(grad is not None for grad in expected))
    ours = build(program, device, dtype)
    _, grads = gradkit.value_and_grads(ours.losses, ours.leaves, weights=weights)
    assert_same_bits(grads, expected)
    tensors = [torch.tensor(w, dtype=torch.float64) for w in weights]
    ours = build(program, device, dtype)
    _, grads = gradkit.value_and_grads(ours.losses, ours.leaves, weights=tensors)
    assert_same_bits(grads, expected)


@given(program=programs(), dtype=dtypes)
def test_per_loss_is_one_autograd_grad_a_loss_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    theirs = build(program, device, dtype)
    expected = [
        torch.autograd.grad(loss, theirs.leaves, retain_graph=True, allow_unused=True)
        for loss in theirs.losses
    ]
    ours = build(program, device, dtype)
    if all(grad is None for row in expected for grad in row):
        assert_refused(lambda: gradkit.per_loss_grads(ours.losses, ours.leaves))
        return
    per_loss = gradkit.per_loss_grads(ours.losses, ours.leaves)
    for loss, grads, row in zip(ours.losses, per_loss, expected, strict=True):
        assert_same_bits(
            grads, [None if g is None else g.reshape(loss.shape + g.shape) for g in row]
        )


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_per_loss_is_one_backward_a_loss_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    """Or an error, if a hook or a Function has written on a gradient; never inside `checked`."""
    ours = build(program, device, dtype)
    assume(reaches(program, device, dtype))
    refusal = ""
    try:
        per_loss = gradkit.per_loss_grads(ours.losses, ours.leaves)
    except gradkit.UnsupportedGraphError as error:
        refusal = str(error)
    if refusal:
        assert any(name in WRITING for name, _, _ in program.ops), refusal
        assert "written in place" in refusal
        ours = build(program, device, dtype)
        with gradkit.checked(), warnings.catch_warnings():
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
            per_loss = gradkit.per_loss_grads(ours.losses, ours.leaves)
    for index, grads in enumerate(per_loss):
        theirs = build(program, device, dtype)
        with writes_on_copies() if refusal else nullcontext():
            theirs.losses[index].backward()
        shape = ours.losses[index].shape
        expected = [
            None if p.grad is None else p.grad.reshape(shape + p.shape) for p in theirs.leaves
        ]
        assert_same_bits(grads, expected)


@given(program=programs(), dtype=dtypes)
def test_the_sum_of_per_loss_is_the_joint_gradient_to_rounding(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    graph = build(program, device, dtype)
    assume(reaches(program, device, dtype))
    _, joint = gradkit.value_and_grads(graph.losses, graph.leaves, retain_graph=True)
    scalars = [loss.reshape(()) for loss in graph.losses]
    summed = gradkit.tree.weighted_sum(gradkit.per_loss_grads(scalars, graph.leaves))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    scale = max(1.0, float(gradkit.tree.global_norm(joint)))
    assert gradkit.tree.allclose(summed, joint, rtol=tolerance, atol=tolerance * scale)
    for a, b in zip(summed, joint, strict=True):
        assert (a is None) == (b is None)


@given(program=programs(ops=tuple(op for op in OPS if op != "halve"), vector=True), dtype=dtypes)
def test_batched_is_sequential_to_rounding(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    graph = build(program, device, dtype)
    chunk = 1 + program.seed % 3
    assume(reaches(program, device, dtype))
    sequential = gradkit.per_loss_grads(graph.losses, graph.leaves, retain_graph=True)
    kwargs = {"strategy": "batched", "chunk_size": chunk}
    has_hooks = bool(program.leaf_hooks) or any("hook" in op for op, *_ in program.ops)
    with (
        patch.object(PassRunner, "batched_grads", autospec=True, side_effect=BATCH) as passes,
        warnings.catch_warnings(),
    ):
        if has_hooks:  # that compute with their gradient: a pass for each element, with a warning
            warnings.simplefilter("ignore", gradkit.GradkitWarning)
        batched = gradkit.per_loss_grads(graph.losses, graph.leaves, retain_graph=True, **kwargs)
        assert has_hooks or passes.call_count == len(graph.losses) * -(-3 // chunk)
        freeing = gradkit.per_loss_grads(graph.losses, graph.leaves, **kwargs)
    for row, reference in zip(batched, sequential, strict=True):
        assert [grad is None for grad in row] == [grad is None for grad in reference]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    scale = max([1.0, *(float(gradkit.tree.global_norm(row)) for row in sequential)])
    assert gradkit.tree.allclose(batched, sequential, rtol=tolerance, atol=tolerance * scale)
    assert gradkit.tree.allclose(freeing, sequential, rtol=tolerance, atol=tolerance * scale)
    for row in batched:
        for grad, leaf in zip(row, graph.leaves, strict=True):
            assert grad is None or grad.shape == (3, *leaf.shape)


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes, with_grad=st.booleans())
def test_calls_are_pure(
    device: torch.device, program: Program, dtype: torch.dtype, with_grad: bool
) -> None:
    graph = build(program, device, dtype)
    for leaf in graph.leaves if with_grad else ():
        leaf.grad = torch.ones_like(leaf)
    world = World(*graph.leaves, *graph.values, *graph.losses)
    assume(reaches(program, device, dtype))
    losses, params = {"l": graph.losses}, {"p": graph.leaves, "none": None}
    for call in (gradkit.value_and_grads, gradkit.per_loss_grads):
        try:
            call(losses, params, retain_graph=True)
        except gradkit.UnsupportedGraphError:  # of what writes on a gradient
            if not any(name in WRITING for name, _, _ in program.ops):
                raise
        world.assert_unchanged()
        assert list(losses) == ["l"]
        assert losses["l"] is graph.losses
        assert list(params) == ["p", "none"]
        assert params["p"] is graph.leaves


@given(program=programs(), dtype=dtypes)
def test_results_may_be_changed_in_place_without_anything_else_changing(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    graph = build(program, device, dtype)
    params = [*graph.leaves, *graph.values[len(graph.leaves) :]]  # leaves and all that follows
    assume(reaches(program, device, dtype))
    _, grads = gradkit.value_and_grads(graph.losses, params, retain_graph=True)
    kept = [tensor.clone() for tensor in graph.kept]
    world = World(*params, *graph.losses)
    expected = [None if grad is None else grad.clone() for grad in grads]
    for index, grad in enumerate(grads):
        if grad is not None:
            grad.add_(1)
            expected[index] = expected[index] + 1
            assert_same_bits(grads, expected)
    assert_same_bits(graph.kept, kept)
    world.assert_unchanged()


@given(program=programs(), dtype=dtypes)
def test_a_non_leaf_gets_what_its_hooks_leave_whatever_else_is_asked_for(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    theirs = build(program, device, dtype)
    inner = theirs.values[len(theirs.leaves) :]
    for value in inner:
        value.retain_grad()
    torch.autograd.backward(theirs.losses)
    ours = build(program, device, dtype)
    params = {"leaves": ours.leaves, "inner": ours.values[len(ours.leaves) :]}
    assume(any(t.grad is not None for t in theirs.values))
    _, grads = gradkit.value_and_grads(ours.losses, params)
    assert_same_bits(grads["inner"], [value.grad for value in inner])
    assert_same_bits(grads["leaves"], [leaf.grad for leaf in theirs.leaves])


@given(program=programs(), dtype=dtypes, which=st.integers(0, 30))
def test_safe_retain_is_retain_grad_where_that_is_right(
    device: torch.device, program: Program, dtype: torch.dtype, which: int
) -> None:
    theirs = build(program, device, dtype)
    target = theirs.values[which % len(theirs.values)]
    target.retain_grad()  # on a leaf, where .backward() writes .grad anyway
    torch.autograd.backward(theirs.losses)
    ours = build(program, device, dtype)  # all later uses stand before the call
    tensor = ours.values[which % len(ours.values)]
    with gradkit.safe_retain([tensor]) as kept:
        torch.autograd.backward(ours.losses)
    assert_same_bits(kept.grads, [target.grad])
    assert_same_bits(kept.passes[0], [] if target.grad is None else [target.grad])


@given(program=programs(), dtype=dtypes, which=st.integers(0, 30))
def test_safe_retain_is_autograd_grad_at_the_value_of_the_call(
    device: torch.device, program: Program, dtype: torch.dtype, which: int
) -> None:
    graph = build(program, device, dtype)
    h = graph.values[which % len(graph.values)] * 1.5
    loss = graph.losses[0].sum() + (h * 2).sum()
    (expected,) = torch.autograd.grad(loss, h, retain_graph=True)
    with gradkit.safe_retain({"h": h}) as kept:
        gradkit.value_and_grads(loss, graph.leaves, unused="zeros", retain_graph=True)
    assert_same_bits([kept.grads["h"]], [expected])
    # An in-place change after the call moves nothing: the old value is still the one asked for.
    with gradkit.safe_retain({"h": h}) as kept:
        later = loss + (h.mul_(2) * 3).sum()
        gradkit.value_and_grads(later, graph.leaves, unused="zeros")
    torch.testing.assert_close(kept.grads["h"], expected + 6)
