"""The graphs of several losses, and what they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import graph, saved_tensors


@dataclass(frozen=True)
class Graphs:
    """The nodes and the leaf tensors, by id, of each loss's graph. Sets of losses are bit masks."""

    losses: Sequence[Tensor]
    nodes: list[set[Node]]
    leaves: list[dict[int, Tensor]]

    @cached_property
    def reached_by(self) -> dict[Node, int]:
        """The losses that reach each node."""
        masks: dict[Node, int] = {}
        for index, nodes in enumerate(self.nodes):
            for node in nodes:
                masks[node] = masks.get(node, 0) | 1 << index
        return masks

    @cached_property
    def operations(self) -> dict[int, int]:
        """For each set of losses, the number of nodes that exactly these reach."""
        counts: dict[int, int] = {}
        for node, mask in self.reached_by.items():
            if not graph.is_leaf_node(node):
                counts[mask] = counts.get(mask, 0) + 1
        return counts

    @cached_property
    def released(self) -> set[Node]:
        """The nodes that an earlier pass has freed."""
        return set(filter(saved_tensors.has_released, self.reached_by))

    def count(self, index: int) -> int:
        """Return the number of operations in the graph of a loss."""
        return sum(count for mask, count in self.operations.items() if mask >> index & 1)

    def kinds(self, index: int) -> set[type]:
        """Return the types of the nodes in the graph of a loss."""
        return set(map(type, self.nodes[index]))

    def entry(self, index: int) -> int | None:
        """Return the losses that reach the node in which a loss starts; None for a constant."""
        loss = self.losses[index]
        return self.reached_by[graph.edge(loss).node] if loss.requires_grad else None

    def reaches(self, index: int, variable: Tensor) -> bool:
        """Return whether a gradient of a loss can arrive at a tensor that requires grad."""
        return graph.reached(variable, [self.losses[index]], self.nodes[index], self.leaves[index])

    def meets_released(self, index: int, variables: Iterable[Tensor]) -> bool:
        """Return whether a pass from a loss to some tensors would execute a freed node."""
        nodes = self.nodes[index]
        if self.released.isdisjoint(nodes):
            return False
        return not self.released.isdisjoint(graph.leading_to(variables, nodes))

    def steps(self) -> dict[int, set[int]]:
        """Return, for each set of losses, the sets into whose nodes its nodes lead."""
        steps: dict[int, set[int]] = {}
        for node, mask in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != mask:
                    steps.setdefault(mask, set()).add(self.reached_by[child])
        return steps


def walk(losses: Sequence[Tensor]) -> Graphs:
    """Walk the graph of every loss; that of a constant is empty."""
    nodes = [graph.nodes_below([loss]) if loss.requires_grad else set() for loss in losses]
    return Graphs(losses, nodes, list(map(graph.leaf_tensors, nodes)))
