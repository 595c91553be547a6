"""Reads the autograd graph: which nodes a pass visits, and which tensors it ends at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradkit._compat.autograd import AccumulateGrad, sequence_number
from gradkit._compat.nodes import has_released, saved_names


class Subgraph:
    """The nodes that a pass from some roots could visit, walked at most once; 0.4 us a node."""

    def __init__(
        self, roots: Iterable[Tensor], stop: Collection[Node] = (), oldest: int = 0
    ) -> None:
        self.roots = [root for root in roots if root.requires_grad]  # the others have no graph
        self.stop = stop  # nodes that belong to it, but are not walked past
        self.oldest = oldest  # the sequence number of the oldest node that is looked at
        self._leading: dict[object, set[Node]] = {}

    @cached_property
    def nodes(self) -> set[Node]:
        """The nodes of the roots, and all below them."""
        return set(self.stop).union(*(part.nodes for part in self.parts))

    @cached_property
    def parts(self) -> list[Part]:
        """For each root the nodes that it reaches, and no later root does."""
        return _parts(self.roots, self.stop, self.oldest)

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
        return self.oldest > 0 and Subgraph(self.roots, self.stop).reaches(variable)

    def leading_to(self, variables: Sequence[Tensor], extra: Sequence[Node] = ()) -> set[Node]:
        """Return the nodes that a pass executes for the gradients of some variables."""
        # These are the nodes above a variable, or above one of the `extra` nodes. The variables'
        # own nodes are not executed: the engine only captures there.
        key = (*map(id, variables), *extra)
        if key not in self._leading:
            every_leaf = self.leaves.keys() <= set(map(id, variables))
            self._leading[key] = self._inner if every_leaf else self._walk_up(variables, extra)
        return self._leading[key]

    @cached_property
    def _inner(self) -> set[Node]:
        # Each node leads to a leaf.
        return {node for node in self.nodes if not is_leaf_node(node)}

    def _walk_up(self, variables: Sequence[Tensor], extra: Sequence[Node]) -> set[Node]:
        ids = set(map(id, variables))
        stack = [node for node in self.nodes if is_leaf_node(node) and id(_variable(node)) in ids]
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

    def __init__(self, roots: Sequence[Tensor], oldest: int = 0) -> None:
        self.roots = roots  # the tensors that are differentiated, one for each loss
        self.oldest = oldest  # as in `Subgraph`
        self._subgraphs: dict[tuple[int, ...], Subgraph] = {}

    def below(self, indices: Iterable[int]) -> Subgraph:
        """Return the graph of some of the losses together."""
        key = tuple(indices)
        if key not in self._subgraphs:
            roots = [self.roots[index] for index in key]
            self._subgraphs[key] = Subgraph(roots, oldest=self.oldest)
        return self._subgraphs[key]


def oldest_node(variables: Iterable[Tensor]) -> int:
    """Return a sequence number such that no node before it leads to one of the variables."""
    # A node is newer than those that it leads to, so that a pass for intermediate values, as those
    # of an inner loop, executes only what is newer than they are. The age of leaves is unknown: 0.
    nodes = [variable.grad_fn for variable in variables]
    return min((0 if node is None else sequence_number(node) for node in nodes), default=0)


def edge(tensor: Tensor) -> GradientEdge:
    """Return the edge of the graph at which the gradient of a tensor arrives."""
    has_views = tensor.layout == torch.strided and not tensor.is_nested
    if has_views or tensor.grad_fn is not None:
        return get_gradient_edge(tensor)
    with torch.enable_grad():  # torch would take a view, which others do not have
        copy = cast("Any", tensor.clone().grad_fn)
    return GradientEdge(copy.next_functions[0][0], 0)


class Part(NamedTuple):
    """What one of several roots reaches."""

    nodes: list[Node]  # those that it reaches, and no later root does
    shared: list[Node]  # those right below them, or the root's own, that a later root reaches


def nodes_below(roots: Iterable[Tensor], stop: Iterable[Node] = (), oldest: int = 0) -> set[Node]:
    """Return every node that a pass from these roots could visit, without entering `stop`."""
    # Nor what is older than `oldest`; but if a root is, it was made in another thread, whose
    # numbers are its own, and they tell nothing.
    return set[Node]().union(*(part.nodes for part in _parts(roots, stop, oldest)))


def _parts(roots: Iterable[Tensor], stop: Iterable[Node], oldest: int) -> list[Part]:
    tops = [root.grad_fn or edge(root).node for root in roots]
    if oldest and any(sequence_number(top) < oldest for top in tops):
        oldest = 0
    reached_from: dict[Node, int] = dict.fromkeys(stop, -1)  # the index of a root
    last_first = reversed(list(enumerate(tops)))
    parts = [_part(top, index, reached_from, oldest) for index, top in last_first]
    if sum(len(part.nodes) for part in parts) > _MOST_TO_FREE_AT_ONCE:
        for top in tops:
            _free_in_order(top)
    return parts[::-1]


def _part(top: Node, index: int, reached_from: dict[Node, int], oldest: int) -> Part:
    if top in reached_from:
        return Part([], [top])
    reached_from[top] = index
    nodes: list[Node] = [top]
    shared: list[Node] = []
    for node in nodes:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child is None:
                continue
            other = reached_from.get(child)
            if other is None:
                if not oldest or sequence_number(child) >= oldest:
                    reached_from[child] = index
                    nodes.append(child)
            elif other != index:
                shared.append(child)
    return Part(nodes, shared)


# A node that Python has seen is freed through Python, each inside the one above it: a chain of some
# 40,000 such nodes overflows the stack.
_MOST_TO_FREE_AT_ONCE = 10_000
_HELD_BY_ONE = 2_000
_FREED_IN_ORDER = "gradkit: older nodes, the newest last"


def _free_in_order(top: Node) -> None:
    """Let the nodes below one be freed one after the other, newest first."""
    # A list lets go of its items from its end, so that each node dies while the list still holds
    # those below it. Every so often a node holds such a list of those that are next below:
    # whichever tensor of the graph outlives the others, not many nodes are above the next list.
    if _FREED_IN_ORDER in cast("dict[str, object]", top.metadata):
        return
    seen, stack = {top}, [top]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in seen and not is_leaf_node(node):
                seen.add(node)
                stack.append(node)
    oldest_first = sorted(seen, key=sequence_number)
    for begin in range(0, len(oldest_first) - 1, _HELD_BY_ONE):
        end = min(begin + _HELD_BY_ONE, len(oldest_first) - 1)
        metadata = cast("dict[str, object]", oldest_first[end].metadata)
        metadata[_FREED_IN_ORDER] = oldest_first[begin:end]


def leaf_tensors(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Return the leaf tensors whose gradients the nodes accumulate, by id."""
    leaves = (_variable(node) for node in nodes if is_leaf_node(node))
    return {id(leaf): leaf for leaf in leaves}


def is_leaf_node(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a leaf tensor."""
    return type(node) is AccumulateGrad


def _variable(node: Any) -> Tensor:
    return cast("Tensor", node.variable)


def has_rebuilt_history(view: Tensor) -> bool:
    """Return whether torch has rebuilt the history of a view, as after a change of its base."""
    node = view.grad_fn
    return view._version > 0 and node is not None and node.name() == "AsStridedBackward0"


def was_used_before_change(variable: Tensor, nodes: set[Node]) -> bool:
    """Return whether an earlier value of a tensor that was changed in place is in a graph [C8]."""
    if variable._is_view():
        return False  # its version counts the changes of all views of the same memory
    node = variable.grad_fn
    for _ in range(min(variable._version, 16)):
        # The first input of an in-place operation is the earlier value.
        if node is None or not node.next_functions:
            return False
        node = node.next_functions[0][0]
        if node in nodes and not is_leaf_node(node):
            return True
    return False


def is_freed(loss: Tensor) -> bool:
    """Return whether the first node below `loss` that saves tensors has lost one."""
    # This sees a loss that has been differentiated before, in a microsecond or two; not a graph
    # that is freed further down, as a trunk shared with such a loss is.
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if saved_names(type(node)):
            return has_released(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False
