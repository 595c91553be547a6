"""Walks of the graph, from roots down: every node, or as far as the ends of a pass need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.autograd import sequence_number
from gradkit._core.deep_graphs import MOST_TO_FREE_AT_ONCE, free_in_order, keep_freeable
from gradkit._core.tensor_nodes import edge, is_leaf_node, leaf_of, metadata


class Part(NamedTuple):
    """What one of several roots reaches."""

    nodes: list[Node]  # those that it reaches, and no later root does
    shared: list[Node]  # those right below them, or the root's own, that a later root reaches


def nodes_below(roots: Iterable[Tensor], stop: Iterable[Node] = (), oldest: int = 0) -> set[Node]:
    """Return every node that a pass from these roots could visit, without entering `stop`."""
    # Nor what has a number below `oldest`, which tells of nodes of one thread; a root that has one
    # was made in another.
    tops = [root.grad_fn or edge(root).node for root in roots]
    if oldest and any(sequence_number(top) < oldest for top in tops):
        oldest = 0
    reached = set(stop)
    nodes = [top for top in dict.fromkeys(tops) if top not in reached]
    reached.update(nodes)
    for node in nodes:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child not in reached and child is not None:
                if oldest and sequence_number(child) < oldest:
                    continue
                reached.add(child)
                nodes.append(child)
    if len(nodes) > MOST_TO_FREE_AT_ONCE:
        free_in_order(nodes)
    return set(nodes)


def nodes_in_order(roots: Iterable[Tensor]) -> Iterator[Node]:
    """Yield the nodes below some roots, those next to them first; the caller may stop."""
    nodes = list(dict.fromkeys(root.grad_fn or edge(root).node for root in roots))
    reached = set(nodes)
    for node in nodes:  # which grows meanwhile
        yield node
        for child, _ in node.next_functions:
            if child not in reached and child is not None:
                reached.add(child)
                nodes.append(child)
    if len(nodes) > MOST_TO_FREE_AT_ONCE:
        free_in_order(nodes)


def nodes_of_types(root: Tensor, most: Mapping[type, int]) -> list[Node]:
    """Return the nodes below a root of some types, of each of which there are no more than said."""
    # So the walk ends where all have been seen, as those of a custom loss are at once.
    missing = sum(most.values())
    if not missing:
        return []
    nodes = [root.grad_fn or edge(root).node]
    reached, of_types = set(nodes), []
    for node in nodes:  # which grows meanwhile
        if type(node) in most:
            of_types.append(node)
            missing -= 1
            if not missing and len(nodes) <= MOST_TO_FREE_AT_ONCE:
                return of_types
        for child, _ in node.next_functions:
            if child not in reached and child is not None:
                reached.add(child)
                nodes.append(child)
    if len(nodes) > MOST_TO_FREE_AT_ONCE:
        free_in_order(nodes)
    return of_types


def nodes_executed(root: Tensor, leaves: Collection[int]) -> tuple[list[Node], set[Node]]:
    """Return the nodes below a root, and those that a pass for leaves with these ids executes."""
    top = root.grad_fn or edge(root).node
    parents: dict[Node, list[Node]] = {top: []}
    nodes, leading = [top], []
    for node in nodes:  # which grows meanwhile
        if is_leaf_node(node):
            if id(leaf_of(node)) in leaves:
                leading.append(node)
            continue
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child in parents:
                parents[child].append(node)
            else:
                parents[child] = [node]
                nodes.append(child)
    executed: set[Node] = set()
    for node in leading:  # which grows, too
        above = [parent for parent in parents[node] if parent not in executed]
        executed.update(above)
        leading += above
    if len(nodes) > MOST_TO_FREE_AT_ONCE:
        free_in_order(nodes)
    return nodes, executed


def kinds_in_short_pass(root: Tensor, ends: Collection[Node], most: int) -> set[type] | None:
    """Return the types of all nodes that a pass to these ends may execute; None if not sure."""
    # That is, if there are more than `most`, or an end may be below another. The pass ends at
    # leaves if there are no ends.
    top = root.grad_fn
    if top is None or top in ends:
        return None
    reached, nodes, missing = {top, *ends}, [top], set(ends)
    for node in nodes:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child in missing:
                missing.remove(child)
            elif child is not None and child not in reached:
                reached.add(child)
                nodes.append(child)
        if len(nodes) > most:
            return None
    if missing:
        return None
    oldest, below = min(map(sequence_number, ends), default=0), list(ends)
    # An end, or what the pass executes: there, some end may be below another.
    known = {*ends, *(node for node in nodes if not is_leaf_node(node))}
    for node in below:  # as far as it is as new as the ends, like `_Bounds`
        for child, _ in node.next_functions:
            if child in known or len(below) > most:
                return None
            if child is not None and child not in reached and sequence_number(child) >= oldest:
                reached.add(child)
                below.append(child)
    if ends:
        keep_freeable(ends, len(nodes) + len(below))
    return set(map(type, nodes))


def parts_below(
    roots: Iterable[Tensor], stop: Iterable[Node], ends: Collection[Node] = frozenset()
) -> list[Part]:
    """Return what each of the roots reaches, as `Subgraph` says of `stop` and `ends`."""
    tops = [root.grad_fn or edge(root).node for root in roots]
    last_first = list(enumerate(tops))[::-1]
    reached_from: dict[Node, int] = dict.fromkeys(stop, -1)  # the index of a root
    bounds = _Bounds(ends) if ends else _NO_BOUNDS
    parts = [_part(top, index, reached_from, bounds) for index, top in last_first]
    if ends:
        for part, (index, _) in zip(parts, last_first, strict=True):
            bounds.extend_below_ends(part, index, reached_from)
        if bounds.tell_nothing(reached_from.keys()):
            return parts_below(roots, stop)
    if sum(len(part.nodes) for part in parts) > MOST_TO_FREE_AT_ONCE:
        free_in_order([node for part in parts for node in part.nodes])
    elif ends or stop:
        keep_freeable(set(ends or stop), sum(len(part.nodes) for part in parts))
    return parts[::-1]


def _part(top: Node, index: int, reached_from: dict[Node, int], bounds: _Bounds) -> Part:
    if top in reached_from:
        return Part([], [top])
    reached_from[top] = index
    nodes: list[Node] = [top]
    shared: list[Node] = []
    ends, oldest = bounds.ends, bounds.oldest
    for node in nodes:  # which grows meanwhile
        if node in ends:
            continue
        for child, _ in node.next_functions:
            if child is None:
                continue
            other = reached_from.get(child)
            if other is None:
                if not oldest or sequence_number(child) >= oldest or bounds.leads_to_end(child):
                    reached_from[child] = index
                    nodes.append(child)
            elif other != index:
                shared.append(child)
    return Part(nodes, shared)


class _Bounds:
    """How far a walk goes whose passes end at intermediate values, as those of an inner loop do."""

    # The graph of a loop may be a thousand times what a pass in it executes. A node's number is
    # above those of the nodes that its thread made before; those of other threads, such as the
    # engine's own for a device, have numbers of theirs. So a number alone leaves out nothing but
    # what is below an end, where another end is all that matters.

    def __init__(self, ends: Collection[Node]) -> None:
        self.ends = ends
        self.oldest = min(map(sequence_number, ends), default=0)
        self._below_ends: set[Node] = set()
        self._left_out: list[Node] = []  # right below those
        self._are_mixed = False  # something below an end is an end, or above one for another root

    def leads_to_end(self, node: Node) -> bool:
        """Return whether an old node leads to an end."""
        return self._leads_to(node, self.ends)

    def extend_below_ends(self, part: Part, index: int, reached_from: dict[Node, int]) -> None:
        """Add what is below the ends of a part, as far as it is as new as they are."""
        below = [node for node in part.nodes if node in self.ends]
        for node in below:  # which grows meanwhile
            for child, _ in node.next_functions:
                if child is None:
                    continue
                other = reached_from.get(child)
                if child in self.ends:
                    self._are_mixed = True
                elif other is not None:
                    if other != index:
                        part.shared.append(child)
                        self._are_mixed |= child not in self._below_ends and not is_leaf_node(child)
                elif sequence_number(child) >= self.oldest:
                    reached_from[child] = index
                    part.nodes.append(child)
                    below.append(child)
                    self._below_ends.add(child)
                else:
                    self._left_out.append(child)

    def tell_nothing(self, reached: Collection[Node]) -> bool:
        """Return whether what was left out may lead to an end: all has to be walked."""
        if self._are_mixed:
            return True
        # An end that was reached might be below another, too, but through what other threads made.
        # To exclude that, what each step of a loop adds would have to be looked through, always.
        missing = {end for end in self.ends if end not in reached}
        return bool(missing) and any(self._leads_to(node, missing) for node in self._left_out)

    @cached_property
    def _marks_tell(self) -> bool:
        """Whether no end is below a marked node, as an older one may be."""
        return not any(_LEADS_BACK in metadata(end) for end in self.ends)

    def _leads_to(self, top: Node, ends: Collection[Node]) -> bool:
        # What has been looked through is marked, with all that is below: nothing that is made later
        # is there, and each node of a long loop is looked at once.
        seen, nodes = {top}, [top]
        if self._marks_tell and _LEADS_BACK in metadata(top):
            return False
        for node in nodes:  # which grows meanwhile
            for child, _ in node.next_functions:
                if child is None or child in seen or is_leaf_node(child):
                    continue
                if child in ends:
                    return True
                if not (self._marks_tell and _LEADS_BACK in metadata(child)):
                    seen.add(child)
                    nodes.append(child)
        for node in nodes:
            metadata(node)[_LEADS_BACK] = True
        if len(nodes) > MOST_TO_FREE_AT_ONCE:
            free_in_order(nodes)
        return False


_NO_BOUNDS = _Bounds(frozenset())
_LEADS_BACK = "gradkit: leads to nothing newer"
