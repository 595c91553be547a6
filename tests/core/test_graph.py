"""Reading the graph: the shortcut that saves the walk, and the parts that laws do not reach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit._autograd import graph_release
from gradkit._compat import nodes
from gradkit._core import graph, ownership, user_code
from tests.helpers import Sevenfold
from tests.strategies import Program, build, programs


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
