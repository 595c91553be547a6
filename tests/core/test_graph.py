"""Reading the graph: the shortcut that saves the walk, and the parts that laws do not reach."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._autograd import graph_release
from gradkit._compat import nodes
from gradkit._core import graph, ownership, user_code
from tests.helpers import Sevenfold
from tests.strategies import Program, build, programs

# Three values, each computed from the one before, and a loss of the last, or of the last two.
VALUES = Program(
    seed=0,
    leaves=("plain",),
    ops=(("tanh", 0, 0), ("tanh", 1, 0), ("tanh", 2, 0)),
    losses=(("sum", 3),),
)
TWO_VALUES = replace(VALUES, losses=(("sum", 2), ("sum", 3)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def notice_living_functions(device: str) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    assert not any(user_code.functions_alive())
    for make in (
        lambda: Twice.apply(w),
        lambda: torch.vmap(Sevenfold.apply)(w),  # whose node is of a class that torch makes
        lambda: (Twice.apply(w * 2) * 3).sum(),
        lambda: checkpoint(lambda x: x * 2, w, use_reentrant=True),
    ):
        held = make()
        assert any(user_code.functions_alive())
        del held
        assert not any(user_code.functions_alive())

    class Fresh(Twice):
        pass

    held = Fresh.apply(w)
    assert any(user_code.functions_alive())
    del held


@pytest.mark.processes
def test_a_living_custom_function_is_noticed_and_a_dead_one_is_not(device: torch.device) -> None:
    """In a process of its own: another test may leave a Function alive, or hold its class."""
    name = notice_living_functions.__name__
    code = f"from tests.core.test_graph import {name}; {name}({str(device)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_without_exact_reference_counts_every_graph_is_walked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_code._free_threaded.cache_clear()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert any(user_code.functions_alive())
    w = torch.randn(3, device=device, requires_grad=True)
    assert torch.equal(gradkit.value_and_grads((w * w).sum(), w)[1], 2 * w.detach())
    user_code._free_threaded.cache_clear()


def test_walk_leaves_and_reach(device: torch.device) -> None:
    w, v = (torch.randn(4, device=device, requires_grad=True) for _ in range(2))
    left, right = (w * 1).split(2)
    loss = (left * 3).sum()
    below = graph.Subgraph([loss])
    assert below.leaves.keys() == {id(w)}
    assert [below.reaches(t) for t in (w, v, left, right, loss)] == [True, False, True, False, True]
    leading = below.leading_to([left])
    assert {node.name() for node in leading} == {"SumBackward0", "MulBackward0"}
    assert max(nodes.sizes_of_gradients(below.nodes)) == 4


def test_a_view_walks_each_part_once(device: torch.device) -> None:
    w = torch.randn(4, device=device, requires_grad=True)
    trunk = w.exp()
    losses = [trunk.sum(), trunk.prod(), torch.zeros((), device=device)]
    view = graph.GraphView(losses)
    assert view.below([0, 1]) is view.below((0, 1))
    assert view.below([0]).nodes | view.below([1]).nodes == view.below([0, 1]).nodes
    assert not view.below([2]).nodes
    stop = {graph.edge(trunk).node}
    assert graph.Subgraph(losses[:1], stop).nodes == {graph.edge(losses[0]).node, *stop}


@given(program=programs(leaf_hooks=False))
def test_the_parts_of_several_roots(device: torch.device, program: Program) -> None:
    """Each has what its root reaches and no later root does, and meets all that it shares."""
    losses = [x for x in build(program, device, torch.float64).losses if x.requires_grad]
    below = graph.Subgraph(losses)
    later: set[Node] = set()
    for loss, part in reversed(list(zip(losses, below.parts, strict=True))):
        nodes = set(_walked(loss))
        assert len(part.nodes) == len(set(part.nodes))
        assert set(part.nodes) == nodes - later
        children = {child for node in part.nodes for child, _ in node.next_functions}
        assert set(part.shared) == (children | {graph.edge(loss).node}) & later
        later |= nodes
    assert below.nodes == later == graph.nodes_below(losses)


@example(program=VALUES, chosen=[{1, 2}], threads=[0] * 12)
@example(program=VALUES, chosen=[{0, 2}], threads=[0, 1] * 6)
@example(program=VALUES, chosen=[{0, 2}], threads=[1, 0] * 6)
@example(program=TWO_VALUES, chosen=[{0, 2}], threads=[0] * 12)
@given(
    program=programs(leaf_hooks=False),
    chosen=st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=2),
    threads=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_what_leads_to_intermediate_values_without_a_whole_walk(
    device: torch.device, program: Program, chosen: list[set[int]], threads: list[int]
) -> None:
    """What passes of one call, or of two, execute, whichever threads have made the graph."""
    made = build(program, device, torch.float64)
    losses = [loss for loss in made.losses if loss.requires_grad]
    inner = [value for value in made.values if value.grad_fn is not None]
    assume(losses and inner)
    whole = graph.Subgraph(losses)

    def number(node: Node) -> int:
        return node._sequence_nr() + 1000 * threads[node._sequence_nr() % 12]

    for indices in chosen:  # the second call meets what the first has marked
        values = [inner[index % len(inner)] for index in sorted(indices)]
        ends = frozenset(value.grad_fn for value in values if value.grad_fn is not None)
        parts = graph.Subgraph(losses, stop=ends).parts
        directly = {node for part in parts for node in part.shared}
        above = [whole.leading_to([v]) for v in values if v.grad_fn in directly]
        with pytest.MonkeyPatch.context() as patch:
            if not any(nodes & ends for nodes in above):
                # Else one end is right there, and below another, where the numbers have to tell.
                patch.setattr("gradkit._core.graph.sequence_number", number)
            below = graph.Subgraph(losses, ends=ends)
            assert [*map(below.reaches, values)] == [*map(whole.reaches, values)]
            executed = whole.leading_to(values)
            assert below.leading_to(values) == executed
            for part, every in zip(below.parts, whole.parts, strict=True):
                assert set(part.nodes) & executed == set(every.nodes) & executed
                assert set(part.shared) & executed == set(every.shared) & executed


def _walked(loss: Tensor) -> Iterator[Node]:
    stack = [graph.edge(loss).node]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child, _ in node.next_functions if child is not None]


def test_a_deep_graph_needs_no_recursion(device: torch.device) -> None:
    w = torch.ones((), device=device, requires_grad=True)
    y = w
    for _ in range(20_000):
        y = y * 1.0
    losses = [y, y * 2]
    assert gradkit.per_loss_grads(losses, w, unused="error") == [1, 2]


def test_a_deep_graph_of_several_calls_needs_no_recursion(device: torch.device) -> None:
    """Each of them sees a part of it."""
    y = torch.ones((), device=device, requires_grad=True) * 1
    for _ in range(8):
        h = y
        for _ in range(9_000):
            h = h * 1.0
        (grad,) = gradkit.value_and_grads(h, [y], retain_graph=True)[1]
        assert grad == 1
        y = h
    del h, y


class Watched(torch.autograd.Function):
    """The identity, whose node can be watched."""

    alive: ClassVar[list[weakref.ref[object]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.watched = type("Watchable", (), {})()
        Watched.alive.append(weakref.ref(ctx.watched))
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_a_part_of_a_large_graph_outlives_the_others_alone(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    Watched.alive.clear()
    branches = [Watched.apply(w).sum() for _ in range(4_000)]
    total = torch.stack(branches).sum()
    gradkit.per_loss_grads([total, total * 2], [w])
    kept = branches[3_000]
    del branches, total
    gc.collect()
    assert sum(each() is not None for each in Watched.alive) == 1
    del kept
    gc.collect()
    assert not any(each() is not None for each in Watched.alive)


def test_a_large_graph_of_two_threads_is_freed(device: torch.device) -> None:
    w = torch.ones((), device=device, requires_grad=True)
    Watched.alive.clear()
    made = [Watched.apply(w)]

    def lengthen() -> None:
        for _ in range(3_000):
            made[0] = made[0] * 1.0

    lengthen()
    other = threading.Thread(target=lengthen)
    other.start()
    other.join()
    losses = [made[0].sin(), made[0].cos()]
    gradkit.per_loss_grads(losses, [w], retain_graph=True)
    made.clear()
    losses.clear()
    gc.collect()
    assert Watched.alive[0]() is None


def test_releasing_a_node_twice_does_nothing(device: torch.device) -> None:
    w = torch.randn(3, device=device, requires_grad=True)
    y = Twice.apply((w * w).exp())
    nodes = graph.nodes_below([y.sum()])
    for _ in range(2):
        graph_release.release(nodes)
    with pytest.raises(gradkit.FreedGraphError, match="earlier gradkit call"):
        torch.autograd.grad(y.sum(), w)


@pytest.mark.parametrize("shape", [(), (1,), (0, 2), (2, 3)])
def test_memory_for_a_gradient(device: torch.device, shape: tuple[int, ...]) -> None:
    p = torch.randn(shape, device=device)
    for leading in ((), (4,), (2, 0), (3, 2)):
        made = ownership.empty_for(p, torch.float64, leading)
        assert made.shape == leading + shape
        assert made.dtype == torch.float64
        if made.numel():
            assert made.is_contiguous() or not p.is_contiguous()
    transposed = torch.randn(3, 2, device=device).t()
    assert ownership.empty_for(transposed, torch.float32, (5,)).stride() == (
        6,
        *transposed.stride(),
    )


CHAIN = """
import torch, gradkit
w, u = (torch.ones(1, requires_grad=True) for _ in range(2))
z = w
for _ in range(60_000):
    z = {step}
loss = z.sum()
{call}
del loss
{last}
print("alive")
"""


ERROR = """try: gradkit.value_and_grads(loss, {'w': w, 'u': u}, unused='error')
except gradkit.UnreachedParamError: pass"""
EXPLAIN = "gradkit.report.explain(loss, {'w': w, 'u': u})"
PER_LOSS = "gradkit.per_loss_grads([loss, (z * 2).sum()], w, retain_graph=True)"
AGAIN = "y = z + 1; del z; gradkit.per_loss_grads(y, w); del y"
RESIDUAL = "z + torch.tanh(z) * 0"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "call", "last"),
    [
        ("z * 1.0", ERROR, "del z"),
        (RESIDUAL, EXPLAIN, "del z"),
        (RESIDUAL, PER_LOSS, AGAIN),
    ],
)
def test_a_long_chain_is_walked_and_freed(
    device: torch.device, step: str, call: str, last: str
) -> None:
    """Nodes that Python has seen are freed by recursion, unless something lets them go in order."""
    code = CHAIN.format(step=step, call=call, last=last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-500:]
