"""The graphs of several losses, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import graph, saved_tensors


@dataclass(frozen=True)
class Graphs:
    """What a walk from each loss has met.

    Attributes:
        losses: The losses.
        nodes: For each loss the nodes of its graph; none for a constant.
        leaves: For each loss the leaf tensors that its graph accumulates into, by id.
    """

    losses: Sequence[Tensor]
    nodes: list[set[Node]]
    leaves: list[dict[int, Tensor]]

    @cached_property
    def reached_by(self) -> dict[Node, int]:
        """For every node the losses whose graph it is in, as the bits of a number."""
        found: dict[Node, int] = {}
        for index, nodes in enumerate(self.nodes):
            for node in nodes:
                found[node] = found.get(node, 0) | 1 << index
        return found

    @cached_property
    def operations(self) -> dict[int, int]:
        """For every set of losses, as bits, how many nodes exactly these reach."""
        counts: dict[int, int] = {}
        for node, losses in self.reached_by.items():
            if not graph.is_leaf_node(node):
                counts[losses] = counts.get(losses, 0) + 1
        return counts

    @cached_property
    def released(self) -> set[Node]:
        """The nodes that an earlier pass has freed."""
        return set(filter(saved_tensors.has_released, self.reached_by))

    def count(self, index: int) -> int:
        """Return the number of operations in the graph of a loss."""
        return sum(count for losses, count in self.operations.items() if losses >> index & 1)

    def kinds(self, index: int) -> set[type]:
        """Return the types of the nodes of a loss."""
        return set(map(type, self.nodes[index]))

    def reaches(self, index: int, variable: Tensor) -> bool:
        """Return whether a gradient of a loss can arrive at a tensor that requires grad."""
        return graph.reached(variable, [self.losses[index]], self.nodes[index], self.leaves[index])

    def would_meet_freed(self, index: int, variables: Iterable[Tensor]) -> bool:
        """Return whether a pass from a loss for some tensors would meet a freed node."""
        nodes = self.nodes[index]
        if self.released.isdisjoint(nodes):
            return False
        return not self.released.isdisjoint(graph.leading_to(variables, nodes))

    def steps(self) -> dict[int, set[int]]:
        """Return for every set of losses, as bits, those into whose nodes its own lead."""
        found: dict[int, set[int]] = {}
        for node, losses in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != losses:
                    found.setdefault(losses, set()).add(self.reached_by[child])
        return found


def walk(losses: Sequence[Tensor]) -> Graphs:
    """Walk the graph of every loss; nothing runs, and nothing is freed.

    Args:
        losses: Tensors, with a graph or not.

    Returns:
        What was met.
    """
    nodes = [graph.nodes_below([loss]) if loss.requires_grad else set() for loss in losses]
    return Graphs(losses, nodes, list(map(graph.leaf_tensors, nodes)))
