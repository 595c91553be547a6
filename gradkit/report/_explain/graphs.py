"""The graphs of several losses, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import saved_tensors
from gradkit._core.graph import Subgraph, edge, is_leaf_node


class Graphs:
    """The graph of each loss, empty for a constant; sets of losses are masks."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self.losses = losses
        self.each = [Subgraph([loss]) for loss in losses]

    @cached_property
    def reached_by(self) -> dict[Node, int]:
        """The losses that reach each node."""
        masks: dict[Node, int] = {}
        for index, graph in enumerate(self.each):
            for node in graph.nodes:
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

    def entry(self, loss: Tensor) -> int | None:
        """Return the losses that reach the node in which a loss starts; None for a constant."""
        return self.reached_by[edge(loss).node] if loss.requires_grad else None

    def leads_to(self) -> dict[int, set[int]]:
        """Return, for each set of losses, the sets into whose nodes its nodes lead."""
        below: dict[int, set[int]] = {}
        for node, mask in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != mask:
                    below.setdefault(mask, set()).add(self.reached_by[child])
        return below

    @cached_property
    def _released(self) -> set[Node]:
        """The nodes that an earlier pass has freed."""
        return set(filter(saved_tensors.has_released, self.reached_by))

    def meets_released(self, graph: Subgraph, variables: Sequence[Tensor]) -> bool:
        """Return whether a pass through a graph to some tensors would execute a freed node."""
        if self._released.isdisjoint(graph.nodes):
            return False
        return not self._released.isdisjoint(graph.leading_to(variables))
