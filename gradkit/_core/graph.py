"""The graph of a call's losses: which nodes a pass visits, and which tensors it ends at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core.graph_walk import Part, parts_below
from gradkit._core.tensor_nodes import edge, leaf_nodes, leaf_of, leaf_tensors


class Subgraph:
    """The nodes that a pass from some roots could visit, walked at most once; 0.4 us a node."""

    def __init__(
        self,
        roots: Iterable[Tensor],
        stop: Collection[Node] = (),
        ends: Collection[Node] = frozenset(),
    ) -> None:
        self.roots = [root for root in roots if root.requires_grad]  # the others have no graph
        self.stop = stop  # nodes that belong to it, but are not walked past
        self.ends = ends  # if any, old nodes that lead to none of them are left out
        self._leading: dict[object, set[Node]] = {}

    @cached_property
    def nodes(self) -> set[Node]:
        """The nodes of the roots, and all below them."""
        return set(self.stop).union(*(part.nodes for part in self.parts))

    @cached_property
    def parts(self) -> list[Part]:
        """For each root the nodes that it reaches, and no later root does."""
        return parts_below(self.roots, self.stop, self.ends)

    @cached_property
    def kinds(self) -> set[type]:
        """The types of the nodes."""
        return set(map(type, self.nodes))

    @cached_property
    def leaves(self) -> dict[int, Tensor]:
        """The leaf tensors whose gradients the nodes accumulate, by id."""
        return leaf_tensors(self.nodes)

    @cached_property
    def _edges(self) -> set[tuple[Node | None, int]]:
        edges = {child for node in self.nodes for child in node.next_functions}
        return edges | {edge(root)[:2] for root in self.roots}

    @cached_property
    def _parents(self) -> dict[Node, list[Node]]:
        parents: dict[Node, list[Node]] = {}
        for node in self.nodes:
            for child, _ in node.next_functions:
                if child is not None:
                    parents.setdefault(child, []).append(node)
        return parents

    def reaches(self, variable: Tensor) -> bool:
        """Return whether a gradient can arrive at a tensor that requires grad."""
        if variable.grad_fn is None:
            return id(variable) in self.leaves
        here = edge(variable)
        if here.node in self.nodes and here[:2] in self._edges:
            return True
        is_left_out = self.ends and here.node not in self.ends
        return bool(is_left_out) and Subgraph(self.roots, self.stop).reaches(variable)

    def leading_to(self, variables: Sequence[Tensor], extra: Sequence[Node] = ()) -> set[Node]:
        """Return the nodes that a pass executes for the gradients of some variables."""
        # These are the nodes above a variable, or above one of the `extra` nodes. The variables'
        # own nodes are not executed: the engine only captures there.
        key = (*map(id, variables), *extra)
        if key not in self._leading:
            self._leading[key] = (
                self._inner if self._ends_at(variables) else self._walk_up(variables, extra)
            )
        return self._leading[key]

    def _ends_at(self, variables: Sequence[Tensor]) -> bool:
        """Return whether all of the graph has been walked, and its leaves are all variables."""
        walked = not self.ends and not self.stop
        return walked and self.leaves.keys() <= set(map(id, variables))

    @cached_property
    def _inner(self) -> set[Node]:
        # Each node leads to a leaf.
        return self.nodes.difference(leaf_nodes(self.nodes))

    def _walk_up(self, variables: Sequence[Tensor], extra: Sequence[Node]) -> set[Node]:
        ids = set(map(id, variables))
        stack = [node for node in leaf_nodes(self.nodes) if id(leaf_of(node)) in ids]
        stack += [variable.grad_fn for variable in variables if variable.grad_fn is not None]
        stack += extra
        leading: set[Node] = set()
        while stack:
            for node in self._parents.get(stack.pop(), ()):
                if node not in leading:
                    leading.add(node)
                    stack.append(node)
        return leading


class GraphView:
    """The graphs of a call's losses: each part is walked when something first asks for it."""

    def __init__(self, roots: Sequence[Tensor], ends: Collection[Node] = frozenset()) -> None:
        self.roots = roots  # the tensors that are differentiated, one for each loss
        self.ends = ends  # as in `Subgraph`
        self._subgraphs: dict[tuple[int, ...], Subgraph] = {}

    def below(self, indices: Iterable[int]) -> Subgraph:
        """Return the graph of some of the losses together."""
        key = tuple(indices)
        if key not in self._subgraphs:
            roots = [self.roots[index] for index in key]
            self._subgraphs[key] = Subgraph(roots, ends=self.ends)
        return self._subgraphs[key]
