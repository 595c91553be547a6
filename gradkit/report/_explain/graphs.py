"""The graphs of several losses, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import saved_tensors
from gradkit._core.graph import Subgraph, edge, is_leaf_node


class Graphs:
    """The graph of each of several losses; that of a constant is empty. Sets of losses are masks.

    Attributes:
        losses: The losses.
    """

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self.losses = losses
        self._graphs = [Subgraph([loss]) for loss in losses]

    @property
    def nodes(self) -> list[set[Node]]:
        """The nodes of each loss's graph."""
        return [graph.nodes for graph in self._graphs]

    @property
    def leaves(self) -> list[dict[int, Tensor]]:
        """The leaf tensors, by id, of each loss's graph."""
        return [graph.leaves for graph in self._graphs]

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
            if not is_leaf_node(node):
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
        return self._graphs[index].kinds

    def entry(self, index: int) -> int | None:
        """Return the losses that reach the node in which a loss starts; None for a constant."""
        loss = self.losses[index]
        return self.reached_by[edge(loss).node] if loss.requires_grad else None

    def reaches(self, index: int, variable: Tensor) -> bool:
        """Return whether a gradient of a loss can arrive at a tensor that requires grad."""
        return self._graphs[index].reaches(variable)

    def meets_released(self, index: int, variables: Sequence[Tensor]) -> bool:
        """Return whether a pass from a loss to some tensors would execute a freed node."""
        graph = self._graphs[index]
        if self.released.isdisjoint(graph.nodes):
            return False
        return not self.released.isdisjoint(graph.leading_to(variables))

    def steps(self) -> dict[int, set[int]]:
        """Return, for each set of losses, the sets into whose nodes its nodes lead."""
        steps: dict[int, set[int]] = {}
        for node, mask in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != mask:
                    steps.setdefault(mask, set()).add(self.reached_by[child])
        return steps
