"""Reading the graph: nodes, leaves, and what several roots share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat import nodes
from gradkit._core import graph
from tests.strategies import Program, build, programs


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
