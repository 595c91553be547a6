"""The short way of separate passes gives what the long way does, which `retain_graph=False` takes.

Those of `per_loss_grads` and `simultaneous_grads`. Both ways give what `torch.autograd.grad` gives
for each loss, free the same nodes, and raise the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node

import gradkit
from gradkit._autograd import plain_passes
from gradkit._compat.nodes import has_released
from tests.eager import short_ways
from tests.eager.short_ways import no_hook_yet, outcome, plain_process, with_others
from tests.helpers import World, assert_owned, assert_same_bits
from tests.strategies import HOOKLESS, OPS, WRITING, Graph, Program, build, programs

dtypes = st.sampled_from([torch.float64, torch.float32])
noting_short_calls = partial(short_ways.noting_short_calls, "plain_separate_grads")


def scalars(graph: Graph) -> list[Tensor]:
    """Return the losses of a graph as 0-dim tensors."""
    return [loss.sum() for loss in graph.losses]


def assert_same_outcome(first: Any, second: Any) -> None:
    if isinstance(first, tuple):
        assert first == second
        return
    assert len(first) == len(second)
    for ours, theirs in zip(first, second, strict=True):
        assert_same_bits(ours, theirs)


def nodes_in_order(losses: list[Tensor]) -> list[Node]:
    """Return the nodes below losses, which are in the same order for the same program."""
    nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    for node in nodes:  # which grows meanwhile
        nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
    return nodes


def assert_freed_alike(first: list[Tensor], second: list[Tensor]) -> None:
    pairs = zip(nodes_in_order(first), nodes_in_order(second), strict=True)
    for ours, theirs in pairs:
        assert type(ours) is type(theirs)
        assert has_released(ours) == has_released(theirs), ours


@given(program=programs(ops=(*OPS, *WRITING)), dtype=dtypes)
def test_among_hooks_and_functions(
    device: torch.device, program: Program, dtype: torch.dtype
) -> None:
    short, long = build(program, device, dtype), build(program, device, dtype)
    first = outcome(lambda: gradkit.per_loss_grads(scalars(short), short.leaves))
    second = outcome(lambda: gradkit.per_loss_grads(scalars(long), long.leaves, retain_graph=False))
    assert_same_outcome(first, second)
    assert all(leaf.grad is None for leaf in short.leaves)


@given(
    program=programs(ops=HOOKLESS, leaf_hooks=False),
    dtype=dtypes,
    fresh=st.booleans(),
    chosen=st.sets(st.integers(0, 3)),
)
def test_the_short_way_is_a_loop_bit_for_bit(
    device: torch.device, program: Program, dtype: torch.dtype, fresh: bool, chosen: set[int]
) -> None:
    """With respect to all leaves, or to some: what leads to none of them is not freed."""
    ours, long, theirs = (build(program, device, dtype) for _ in range(3))
    params, of_long, of_loop = (
        [leaf for index, leaf in enumerate(one.leaves) if index in chosen] or one.leaves
        for one in (ours, long, theirs)
    )
    losses, long_losses = scalars(ours), scalars(long)
    expected = [
        torch.autograd.grad(loss, of_loop, retain_graph=True, allow_unused=True)
        for loss in scalars(theirs)
    ]
    functions = "halve" in [op for op, _, _ in program.ops]
    process = plain_process(functions=functions)
    with no_hook_yet() if fresh else nullcontext(), process, noting_short_calls() as taken:
        first = outcome(lambda: gradkit.per_loss_grads(losses, params))
    second = outcome(lambda: gradkit.per_loss_grads(long_losses, of_long, retain_graph=False))
    assert_same_outcome(first, second)
    assert_freed_alike(losses, long_losses)
    if isinstance(first, tuple):
        assert first[0] is gradkit.UnreachedParamError
        assert all(grad is None for grads in expected for grad in grads)
        return
    assert taken == [True] or functions
    every = [grad for grads in first for grad in grads]
    assert_same_bits(every, [grad for grads in expected for grad in grads])
    assert_owned(every, params * len(losses))
    world = World(*ours.leaves, *losses)
    for grad in every:
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()


@given(
    program=programs(ops=HOOKLESS, leaf_hooks=False),
    fresh=st.booleans(),
    chosen=st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4),
)
def test_players_are_a_loop_bit_for_bit(
    device: torch.device, program: Program, fresh: bool, chosen: list[set[int]]
) -> None:
    """Each loss with respect to some leaves of its own, which others may share."""
    ours, long, theirs = (build(program, device, torch.float64) for _ in range(3))

    def own(graph: Graph) -> list[list[Tensor]]:
        pairs = zip(chosen, graph.losses, strict=False)
        leaves = graph.leaves
        return [[x for i, x in enumerate(leaves) if i in which] or leaves[:1] for which, _ in pairs]

    losses, long_losses = scalars(ours), scalars(long)
    expected = [
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        for loss, leaves in zip(scalars(theirs), own(theirs), strict=True)
    ]
    functions = "halve" in [op for op, _, _ in program.ops]
    process = plain_process(functions=functions)
    with no_hook_yet() if fresh else nullcontext(), process, noting_short_calls() as taken:
        first = outcome(lambda: gradkit.simultaneous_grads(losses, own(ours)))
    second = outcome(lambda: gradkit.simultaneous_grads(long_losses, own(long), retain_graph=False))
    assert_same_outcome(first, second)
    assert_freed_alike(losses, long_losses)
    if isinstance(first, tuple):
        assert first[0] is gradkit.UnreachedParamError
        return
    assert taken == [True] or functions
    for grads, others, leaves in zip(first, expected, own(ours), strict=True):
        assert_same_bits(grads, others)
        assert_owned(grads, leaves)
    world = World(*ours.leaves, *losses)
    for grad in chain.from_iterable(first):
        if grad is not None:
            grad.add_(1)
    world.assert_unchanged()


@given(
    program=programs(ops=HOOKLESS, leaf_hooks=False),
    places=st.sets(st.integers(0, 4), min_size=1),
    by_player=st.booleans(),
)
def test_leaves_among_frozen_ones(
    device: torch.device, program: Program, places: set[int], by_player: bool
) -> None:
    short, long = (build(program, device, torch.float64) for _ in range(2))
    functions = "halve" in [op for op, _, _ in program.ops]

    def call(graph: Graph, **options: Any) -> Any:
        losses, params = scalars(graph), with_others(graph.leaves, places)
        if by_player:
            return gradkit.simultaneous_grads(losses, [params for _ in losses], **options)
        return gradkit.per_loss_grads(losses, params, **options)

    with plain_process(functions=functions), noting_short_calls() as taken:
        first = outcome(lambda: call(short))
        second = outcome(lambda: call(long, retain_graph=False))
    assert_same_outcome(first, second)
    if isinstance(first, list):
        assert taken == [True] or functions
        params = with_others(short.leaves, places)
        assert all(
            (grad is None) or (leaf is not None and leaf.requires_grad)
            for grads in first
            for leaf, grad in zip(params, grads, strict=True)
        )


@given(program=programs(ops=(*OPS, *WRITING)), chosen=st.sets(st.integers(0, 3)))
def test_players_among_hooks_and_functions(
    device: torch.device, program: Program, chosen: set[int]
) -> None:
    short, long = (build(program, device, torch.float64) for _ in range(2))

    def own(graph: Graph) -> list[list[Tensor]]:
        some = [leaf for index, leaf in enumerate(graph.leaves) if index in chosen]
        return [(some or graph.leaves) if i % 2 else graph.leaves for i in range(len(graph.losses))]

    losses, long_losses = scalars(short), scalars(long)
    first = outcome(lambda: gradkit.simultaneous_grads(losses, own(short)))
    second = outcome(lambda: gradkit.simultaneous_grads(long_losses, own(long), retain_graph=False))
    assert_same_outcome(first, second)
    assert all(leaf.grad is None for leaf in short.leaves)


def test_players_share_no_gradient(device: torch.device) -> None:
    x, y = (torch.tensor(2.0, device=device, requires_grad=True) for _ in range(2))
    with no_hook_yet(), plain_process(), noting_short_calls() as taken:
        first, second = gradkit.simultaneous_grads([x + y, x + y + 1], [{"x": x}, {"x": x, "y": y}])
    assert taken == [True]
    first["x"].add_(1)
    assert [first["x"].item(), second["x"].item(), second["y"].item()] == [2, 1, 1]


@given(program=programs(ops=HOOKLESS, leaf_hooks=False), which=st.integers(0, 3))
def test_a_part_that_is_freed_leaves_the_others_alone(
    device: torch.device, program: Program, which: int
) -> None:
    """Whichever loss was differentiated before, nothing is freed of the rest."""
    ours, long = (build(program, device, torch.float64) for _ in range(2))
    losses, long_losses = scalars(ours), scalars(long)
    for each, leaves in ((losses, ours.leaves), (long_losses, long.leaves)):
        torch.autograd.grad(each[which % len(each)], leaves, allow_unused=True)
    before = list(map(has_released, nodes_in_order(losses)))
    with plain_process(functions=True):
        first = outcome(lambda: gradkit.per_loss_grads(losses, ours.leaves))
    second = outcome(lambda: gradkit.per_loss_grads(long_losses, long.leaves, retain_graph=False))
    assert_same_outcome(first, second)
    assert_freed_alike(losses, long_losses)
    if isinstance(first, tuple) and first[0] is gradkit.FreedGraphError:
        assert list(map(has_released, nodes_in_order(losses))) == before


def losses_that_raise(device: torch.device) -> dict[str, tuple[Any, Any]]:
    """Return (losses, params) by what is wrong with them, made anew."""
    x, w = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    freed = (x * x).sum()
    freed.backward()
    x.grad = None
    changed = torch.ones(2, device=device, requires_grad=True) * 1
    square = (changed * changed).sum()
    changed.add_(1)
    hooked = torch.ones(2, device=device, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(hooked).node
    node.register_prehook(lambda grads: None)
    written = x * 1
    written.register_hook(lambda grad: grad.mul_(2))
    total = (x * x).sum()
    return {
        "a string": ([total, "loss"], [x]),
        "integers": ([total, torch.ones((), device=device, dtype=torch.long)], [x]),
        "no graph": ([torch.ones((), device=device)], [x]),
        "no losses": ([], [x]),
        "freed": ([total, freed], [x]),
        "unreached": ([total, (3 * x).sum()], [w]),
        "frozen": ([total], [w.detach()]),
        "no params": ([total], []),
        "params of integers": ([total], [x, torch.ones(2, device=device).long()]),
        "changed": ([total, square], [x, changed]),
        "a pre-hook": ([total, (hooked * 2).sum()], [hooked]),
        "a hook that writes": ([total, ((written + w) * torch.ones_like(w)).sum()], [x, w]),
        "an exhausted iterator": ([total], iter(())),
    }


@pytest.mark.parametrize("wrong", losses_that_raise(torch.device("cpu")))
def test_errors_are_the_same(device: torch.device, wrong: str) -> None:
    losses, params = losses_that_raise(device)[wrong]
    with pytest.raises(gradkit.GradkitError) as short:
        gradkit.per_loss_grads(losses, params)
    losses, params = losses_that_raise(device)[wrong]
    with pytest.raises(gradkit.GradkitError) as long:
        gradkit.per_loss_grads(losses, params, retain_graph=False)
    assert type(short.value) is type(long.value)
    assert str(short.value) == str(long.value)


@pytest.mark.parametrize("option", ["unused", "create_graph", "retain_graph", "strategy"])
@pytest.mark.parametrize("value", [1, "all", ["none"]])
def test_options_are_read_first(device: torch.device, option: str, value: Any) -> None:
    with pytest.raises(gradkit.OptionError):
        gradkit.per_loss_grads([1.0], [], **{option: value})


def keep_grad_of_second(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[1].retain_grad()


def hook_on_leaf(losses: list[Tensor], params: list[Tensor]) -> None:
    params[0].register_hook(lambda grad: grad * 3)


def second_of_one_element(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[1] = losses[1].reshape(1)


def second_constant(losses: list[Tensor], params: list[Tensor]) -> None:
    losses[1] = losses[1].detach()


def nothing(losses: list[Tensor], params: list[Tensor]) -> None:
    pass


SPECIAL: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Any]] = {
    "inference mode": (torch.inference_mode, nothing),
    "forward mode": (forward_ad.dual_level, nothing),
    "checked": (gradkit.checked, nothing),
    "a loss that retains its gradient": (nullcontext, keep_grad_of_second),
    "a hook of a leaf": (nullcontext, hook_on_leaf),
    "a loss with a dimension": (nullcontext, second_of_one_element),
    "a constant": (nullcontext, second_constant),
}


@pytest.mark.parametrize("special", SPECIAL)
def test_what_needs_the_long_way_takes_it(device: torch.device, special: str) -> None:
    def made() -> tuple[list[Tensor], list[Tensor]]:
        params = [torch.full((2,), float(i + 2), device=device, requires_grad=True) for i in (0, 1)]
        losses = [(params[0] * params[1]).sum(), (params[0] * 3).sum()]
        SPECIAL[special][1](losses, params)
        return losses, params

    theirs, leaves = made()
    expected = [
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        if loss.requires_grad
        else (None, None)
        for loss in theirs
    ]
    losses, params = made()
    with SPECIAL[special][0](), noting_short_calls() as taken:
        per_loss = gradkit.per_loss_grads(losses, params)
    assert taken in ([], [False])
    for grads, others in zip(per_loss, expected, strict=True):
        flat = [None if grad is None else grad.reshape(2) for grad in grads]
        assert_same_bits(flat, others)


@pytest.mark.parametrize("fresh", [True, False])
def test_losses_of_several_dtypes(device: torch.device, fresh: bool) -> None:
    x = torch.full((3,), 2.0, device=device, dtype=torch.float64, requires_grad=True)
    losses = {"double": (x * x).sum(), "half": x.half().sum(), "float": x.float().square().sum()}
    context = no_hook_yet() if fresh else nullcontext()
    with context, plain_process(), noting_short_calls() as taken:
        grads = gradkit.per_loss_grads(losses, x)
    assert taken == [True]
    assert {name: grad.tolist() for name, grad in grads.items()} == {
        "double": [4.0] * 3, "half": [1.0] * 3, "float": [4.0] * 3,
    }  # fmt: skip


def test_gradients_that_are_the_cotangent_are_not_shared(device: torch.device) -> None:
    x = torch.tensor(2.0, device=device, requires_grad=True)
    with no_hook_yet(), plain_process(), noting_short_calls() as taken:
        first, second, third = gradkit.per_loss_grads([x + 1, x + 2, x.clone()], x)
    assert taken == [True]
    first.add_(1)
    assert [first.item(), second.item(), third.item()] == [2, 1, 1]


def test_a_lone_loss_and_one_twice(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    loss = (x * x).sum()
    with plain_process(), noting_short_calls() as taken:
        assert gradkit.per_loss_grads((3 * x).sum(), x).tolist() == [3, 3]
        first, second = gradkit.per_loss_grads((loss, loss), x)
    assert taken == [True, True]
    assert first.tolist() == second.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_what_safe_retain_keeps_is_kept(device: torch.device) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    middle = x * 2
    with gradkit.safe_retain(middle) as kept, noting_short_calls() as taken:
        gradkit.per_loss_grads([(middle * 3).sum(), middle.sum()], [x])
    assert kept.grads.tolist() == [4, 4]
    assert not taken


def test_in_a_transform_the_call_raises_as_before(device: torch.device) -> None:
    def of(x: Tensor) -> Tensor:
        w = torch.ones(2, device=device, requires_grad=True)
        return gradkit.per_loss_grads([(w * 3).sum(), (x * w).sum()], [w])[1][0].sum()

    with pytest.raises(gradkit.UnsupportedGraphError, match=r"outside of torch\.func"):
        torch.func.grad(of)(torch.ones(2, device=device))


def both_ways(call: Callable[..., Any]) -> tuple[Any, Any]:
    """Return what a call gives the short way, and the long way."""
    return outcome(call), outcome(partial(call, retain_graph=False))


def test_a_hook_that_writes_on_what_it_has_kept_of_an_earlier_pass(device: torch.device) -> None:
    """A common accumulator: `kept[0].add_(grad)`."""

    def call(**options: Any) -> Any:
        x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        kept: list[Tensor] = []

        def add(grad: Tensor) -> None:
            if kept:
                kept[0].add_(grad)
            kept.append(grad)

        h = x + b
        h.register_hook(add)
        return gradkit.per_loss_grads([(h * 2).sum(), (h * 3).sum()], [x, b], **options)

    short, long = both_ways(call)
    assert_same_outcome(short, long)
    assert [grad.tolist() for grads in short for grad in grads] == [[2, 2]] * 2 + [[3, 3]] * 2


class Workspace(torch.autograd.Function):
    """Gives its gradients in a tensor that it uses again."""

    space: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.mul(grad, 1, out=Workspace.space)


def test_a_function_that_uses_its_memory_again(device: torch.device) -> None:
    def call(**options: Any) -> Any:
        Workspace.space = torch.empty(2, device=device)
        x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        h = Workspace.apply(x + b)
        return gradkit.per_loss_grads([(h * 2).sum(), (h * 3).sum()], [x, b], **options)

    short, long = both_ways(call)
    assert_same_outcome(short, long)


class Cleared(torch.autograd.Function):
    """Frees what it has saved as soon as its backward reads it, as torch lets it."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(*(x * i for i in range(1, 40)))
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first, *_ = ctx.saved_tensors
        return grad * 3 + 0 * first


def test_what_a_node_has_let_go_in_a_pass_is_not_released_again(device: torch.device) -> None:
    """A wrapper of what it had saved would write to freed memory."""

    def call(**options: Any) -> Any:
        x, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
        trunk = torch.tanh(x * b)
        losses = [Cleared.apply(trunk).sum(), (trunk * 3).sum()]
        return gradkit.per_loss_grads(losses, [x, b], **options)

    for _ in range(20):
        assert_same_outcome(*both_ways(call))


def test_a_graph_that_a_hook_frees_in_a_pass(device: torch.device) -> None:
    def call(**options: Any) -> Any:
        x, b = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
        trunk = torch.tanh(x * b)
        index = torch.tensor([0, 3], device=device)
        top = torch.cat([trunk * 2, trunk])[(index,)]
        total = top.sum()

        def free(grad: Tensor) -> None:
            if not freed:
                freed.append(True)
                torch.autograd.grad(total, trunk)

        freed: list[bool] = []
        value = top * 1.0
        value.register_hook(free)
        return gradkit.per_loss_grads([value.sum(), (trunk * 3).sum()], [x, b], **options)

    for _ in range(20):
        assert_same_outcome(*both_ways(call))


def test_what_hooks_have_packed_is_freed_where_the_trunk_is_not_asked_for(
    device: torch.device,
) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    packed: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor.detach())
        packed.append(weakref.ref(box))
        return box

    trunk = nn.Linear(4, 4, device=device)
    heads = [nn.Linear(4, 1, device=device) for _ in range(3)]
    features = torch.tanh(trunk(torch.ones(2, 4, device=device)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        losses = [torch.tanh(head(features)).square().mean() for head in heads]
    with plain_process(), noting_short_calls() as taken:
        gradkit.per_loss_grads(losses, heads)
    assert taken == [True]
    gc.collect()
    assert packed
    assert not any(box() for box in packed)


def test_not_many_passes_hold_what_their_gradients_are_views_of(device: torch.device) -> None:
    """Those of a concatenation are parts of one cotangent."""
    x, y = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    sizes: list[int] = []
    original = vars(plain_passes)["owned_of_each"]

    def noted(each: list[Any], params: Any) -> Any:
        sizes.append(len(each))
        return original(each, params)

    losses = [(torch.cat([x, y]) * i).sum() for i in range(10)]
    with no_hook_yet(), plain_process(), patch.object(plain_passes, "owned_of_each", noted):
        each = gradkit.per_loss_grads(losses, [x, y])
    assert sum(sizes) == 10
    assert max(sizes) <= 4
    assert_owned(chain.from_iterable(each), [x, y] * 10)


def test_a_sparse_loss_beside_a_dense_one(device: torch.device) -> None:
    def call(**options: Any) -> Any:
        x = torch.tensor(2.0, device=device).to_sparse().requires_grad_()
        try:
            with no_hook_yet(), plain_process():
                return gradkit.per_loss_grads([x.to_dense() * 3, x * 2], [x], **options)
        except (RuntimeError, NotImplementedError) as error:  # torch's own
            return type(error), str(error)

    short, long = both_ways(call)
    assert short == long
