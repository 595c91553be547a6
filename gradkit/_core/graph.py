"""The graph of a call's losses: its nodes, walks down from them, freeing without recursion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from operator import attrgetter
from random import Random
from sys import maxsize
from threading import local
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradkit._compat.autograd import AccumulateGrad, sequence_number
from gradkit._compat.nodes import has_released, saved_names
from gradkit._compat.transforms import data_of, engine_calls, layers, recording_levels, transforms
from gradkit._compat.undoing import INSIDE
from gradkit.errors import UnsupportedGraphError, message


def edge(tensor: Tensor) -> GradientEdge:
    """Return the edge of the graph at which the gradient of a tensor arrives."""
    has_views = tensor.layout == torch.strided and not tensor.is_nested
    if (has_views and not transforms()) or tensor.grad_fn is not None:
        return get_gradient_edge(tensor)
    # Torch would take a view: not all have one, and in a transform, that of a leaf has no node.
    with torch.enable_grad(), INSIDE:
        nodes: Any = (layer.grad_fn for layer in layers(tensor.clone()))
    return GradientEdge(next(filter(None, nodes)).next_functions[0][0], 0)


def leaf_tensors(nodes: Iterable[Node]) -> dict[int, Tensor]:
    """Return the leaf tensors whose gradients the nodes accumulate, by id."""
    return {id(leaf): leaf for leaf in map(leaf_of, leaf_nodes(nodes))}


def leaf_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return those of the nodes that accumulate the gradients of leaf tensors."""
    return [node for node in nodes if type(node) is AccumulateGrad]


def is_leaf_node(node: Node) -> bool:
    """Return whether a node accumulates the gradient of a leaf tensor."""
    return type(node) is AccumulateGrad


# The leaf tensor whose gradient an AccumulateGrad node accumulates.
leaf_of: Callable[[Node], Tensor] = attrgetter("variable")


def has_rebuilt_history(view: Tensor) -> bool:
    """Return whether torch has rebuilt the history of a view, as after a change of its base."""
    node = view.grad_fn
    return view._version > 0 and node is not None and node.name() == "AsStridedBackward0"


def refuse_lost_history(tensors: Sequence[Tensor], path: Callable[[int], str]) -> None:
    """Raise if one of some tensors is a view of whose history torch raises, when asked for it."""
    for index, tensor in enumerate(tensors):
        try:
            _ = tensor.grad_fn
        except RuntimeError as error:
            raise UnsupportedGraphError(message(path(index), *_LOST_HISTORY)) from error


KEEP_HISTORY = (
    "take the gradients before the write, which an optimizer's step is, too; or take views of a "
    "copy, on which nothing writes: a, b = w.clone()"
)
_LOST_HISTORY = (
    "a value as it was computed",
    "one of several views of a tensor (by iteration, unbind, split or chunk) that was changed in "
    "place since: torch has lost its history",
    KEEP_HISTORY,
)


def was_used_before_change(variable: Tensor, nodes: set[Node]) -> bool:
    """Return whether an earlier value of a tensor that was changed in place is in a graph [C8]."""
    if variable._is_view():
        return False  # a version counts the changes of all views of the memory
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
    # The look sees a loss that has been differentiated before, in a microsecond or two; not a graph
    # that is freed further down, as a trunk shared with such a loss is.
    node = loss.grad_fn
    for _ in range(8):
        if node is None:
            return False
        if saved_names(type(node)):
            return has_released(node)
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


def metadata(node: Node) -> dict[str, object]:
    """Return the dict of a node in which whoever likes may keep something."""
    return cast("dict[str, object]", node.metadata)


# A node that Python has seen is freed through Python, each inside the one above it: a chain of some
# 40,000 such nodes overflows the stack.
_MOST_FREED_AT_ONCE = 3_000
_ONE_IN = 64
_CHILDREN = "gradkit: the nodes right below, freed after this one"
_random = Random(0)


class _Waiting(local):
    """The nodes that this thread is about to free, above a None while it frees them."""

    def __init__(self) -> None:
        self.nodes: list[Node | None] = []


class _FreedAfter:
    """Holds the nodes right below another, so that they are freed after it, and not inside."""

    waiting = _Waiting()

    def __init__(self, below: list[Node]) -> None:
        self._below = below

    def __del__(self) -> None:
        waiting = self.waiting.nodes
        if waiting:  # the loop below runs already
            waiting += self._below
            return
        waiting += (None, *self._below)
        self._below.clear()
        try:
            while len(waiting) > 1:
                waiting.pop()
        finally:
            waiting.clear()


def avoid_recursion(nodes: list[Node], *, grows: bool = False) -> None:
    """Let long chains among nodes be freed without recursion; `grows`: each call sees a part."""
    # One node in 64, picked at random, cuts each chain. In their order, all those of one branch of
    # a regular graph may stand at multiples of 64.
    if grows or len(nodes) > _MOST_FREED_AT_ONCE:
        count = int(len(nodes) / _ONE_IN + _random.random())
        for picked in _random.sample(nodes, count) if count else ():
            for node in (picked, *_children(picked)):  # the children get one, too
                metadata(node)[_CHILDREN] = _FreedAfter(_children(node))


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


class OwnNodes(NamedTuple):
    """What one of several roots reaches."""

    nodes: list[Node]  # the nodes that it reaches, and no later root does
    shared: list[Node]  # the nodes right below, or the root's, that a later root reaches


def nodes_below(roots: Iterable[Tensor], stop: Iterable[Node] = (), oldest: int = 0) -> set[Node]:
    """Return every node that a pass from these roots could visit, without entering `stop`."""
    # Nodes with a number below `oldest` are left out. Numbers compare within a thread only: where a
    # root's own is lower, `oldest` is ignored.
    return set(nodes_in_order(roots, stop, oldest))


def nodes_in_order(
    roots: Iterable[Tensor], stop: Iterable[Node] = (), oldest: int = 0
) -> Iterator[Node]:
    """Yield those nodes, the next to the roots first; the caller may stop."""
    tops = dict.fromkeys(root.grad_fn or edge(root).node for root in roots)
    if oldest and any(sequence_number(top) < oldest for top in tops):
        oldest = 0
    reached = set(stop)
    nodes = [top for top in tops if top not in reached]
    reached.update(nodes)
    try:
        for node in nodes:  # the list grows meanwhile
            yield node
            for child, _ in node.next_functions:
                if child is None or child in reached:
                    continue
                if not oldest or sequence_number(child) >= oldest:
                    reached.add(child)
                    nodes.append(child)
    finally:
        avoid_recursion(nodes)


# An attribute of a leaf by which nobody but a function's passes to come differentiates.
PRIVATE = "_gradkit_private"


def leads_to_others(
    roots: Iterable[Tensor], own: Collection[int], known: set[Node] | None = None
) -> bool:
    """Return whether a leaf that requires grad, and whose id is not among these, is below roots."""
    # `PRIVATE` leaves do not count. `known` are nodes below which no leaf is; if none is found, it
    # gets those of this walk.
    nodes: list[Node] = []
    for root in roots:
        if root.grad_fn is not None:
            if known is None or root.grad_fn not in known:
                nodes.append(root.grad_fn)
        elif root.requires_grad and id(root) not in own and not hasattr(root, PRIVATE):
            return True
    reached = set(nodes) if known is None else known.union(nodes)
    try:
        for node in nodes:  # the list grows meanwhile
            for child, _ in node.next_functions:
                if child is None or child in reached:
                    continue
                reached.add(child)
                if type(child) is not AccumulateGrad:
                    nodes.append(child)
                elif (
                    id(leaf := leaf_of(child)) not in own
                    and leaf.requires_grad
                    and not hasattr(leaf, PRIVATE)
                ):
                    return True
    finally:
        avoid_recursion(nodes)
    if known is not None:
        known.update(nodes)
    return False


def recorded_outside(tensor: Tensor) -> bool:
    """Return whether eager code around all functions that are differentiated records a tensor."""
    if not engine_calls.depth:
        return 0 in recording_levels(tensor)
    own = engine_calls.own.union(engine_calls.made)
    return leads_to_others([data_of(tensor)], own, engine_calls.inside)


def leads_to_one_of(roots: Iterable[Tensor], leaves: Iterable[Tensor]) -> bool:
    """Return whether one of some leaves is below the roots: the walk ends at the first."""
    ids = set(map(id, leaves))
    nodes = nodes_in_order(root for root in roots if root.requires_grad)
    return any(is_leaf_node(node) and id(leaf_of(node)) in ids for node in nodes)


def nodes_from(top: Node) -> set[Node]:
    """Return a node, and all below it."""
    reached, nodes = {top}, [top]
    for node in nodes:  # the list grows meanwhile
        new = [child for child in _children(node) if child not in reached]
        reached.update(new)
        nodes += dict.fromkeys(new)
    avoid_recursion(nodes)
    return reached


def nodes_of_types(roots: Iterable[Tensor], most: Mapping[type, int]) -> list[Node]:
    """Return the nodes of some types below roots; `most`: how many of each type exist at most."""
    # The walk ends once their sum is found: those of a custom loss are found at once.
    every = (node for node in nodes_in_order(roots) if type(node) in most)
    return list(islice(every, min(sum(most.values()), maxsize)))


def nodes_executed(root: Tensor, leaves: Collection[int]) -> set[Node]:
    """Return the nodes that a pass for leaves with these ids executes, from one walk."""
    top = root.grad_fn or edge(root).node
    parents: dict[Node, list[Node]] = {top: []}
    nodes, leading = [top], []
    for node in nodes:  # the list grows meanwhile
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
    for node in leading:  # the list grows, too
        above = [parent for parent in parents[node] if parent not in executed]
        executed.update(above)
        leading += above
    avoid_recursion(nodes)
    return executed


def kinds_in_short_pass(root: Tensor, ends: Collection[Node], most: int) -> set[type] | None:
    """Return the types of all nodes that a pass to these ends may execute; None if not sure."""
    # The answer is not sure if there are more than `most`, or an end may be below another. The pass
    # ends at leaves if there are no ends.
    top = root.grad_fn
    if top is None or top in ends:
        return None
    reached, nodes, missing = {top, *ends}, [top], set(ends)
    for node in nodes:  # the list grows meanwhile
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
    # If the walk below the ends meets one of these, an end may be below another.
    known = {*ends, *(node for node in nodes if not is_leaf_node(node))}
    for node in below:  # as far as it is as new as the ends, like `_Bounds`
        for child, _ in node.next_functions:
            if child in known or len(below) > most:
                return None
            if child is not None and child not in reached and sequence_number(child) >= oldest:
                reached.add(child)
                below.append(child)
    if ends:
        avoid_recursion(nodes + below, grows=True)
    return set(map(type, nodes))


def own_nodes_of_each(
    roots: Iterable[Tensor], stop: Iterable[Node], ends: Collection[Node] = frozenset()
) -> list[OwnNodes]:
    """Return what each of the roots reaches, as `Subgraph` says of `stop` and `ends`."""
    tops = [root.grad_fn or edge(root).node for root in roots]
    last_first = list(enumerate(tops))[::-1]
    reached_from: dict[Node, int] = dict.fromkeys(stop, -1)  # the index of a root
    bounds = _Bounds(ends) if ends else _NO_BOUNDS
    parts = [_own_nodes(top, index, reached_from, bounds) for index, top in last_first]
    if ends:
        for part, (index, _) in zip(parts, last_first, strict=True):
            bounds.extend_below_ends(part, index, reached_from)
        if bounds.may_hide_an_end(reached_from.keys()):
            return own_nodes_of_each(roots, stop)
    avoid_recursion([node for part in parts for node in part.nodes], grows=bool(ends or stop))
    return parts[::-1]


def _own_nodes(top: Node, index: int, reached_from: dict[Node, int], bounds: _Bounds) -> OwnNodes:
    if top in reached_from:
        return OwnNodes([], [top])
    reached_from[top] = index
    nodes: list[Node] = [top]
    shared: list[Node] = []
    ends, oldest = bounds.ends, bounds.oldest
    for node in nodes:  # the list grows meanwhile
        if node in ends:
            continue
        for child, _ in node.next_functions:
            if child is None:
                continue
            other = reached_from.get(child)
            if other is None:
                if not oldest or sequence_number(child) >= oldest or bounds.leads_to(child, ends):
                    reached_from[child] = index
                    nodes.append(child)
            elif other != index:
                shared.append(child)
    return OwnNodes(nodes, shared)


class _Bounds:
    """How far a walk goes whose passes end at intermediate values, as those of an inner loop do."""

    # The graph of a loop may be a thousand times what one of its passes executes. Numbers of nodes
    # grow within a thread only, and the engine has threads of its own: so an old node above the
    # ends is looked through (`leads_to`); only below an end its number alone leaves it out.

    def __init__(self, ends: Collection[Node]) -> None:
        self.ends = ends
        self.oldest = min(map(sequence_number, ends), default=0)
        self._below_ends: set[Node] = set()
        self._left_out: list[Node] = []  # right below those
        self._are_nested = False  # something below an end is an end, or above one for another root

    def extend_below_ends(self, part: OwnNodes, index: int, reached_from: dict[Node, int]) -> None:
        """Add what is below the ends of a part, as far as it is as new as they are."""
        below = [node for node in part.nodes if node in self.ends]
        for node in below:  # the list grows meanwhile
            for child, _ in node.next_functions:
                if child is None:
                    continue
                other = reached_from.get(child)
                if child in self.ends:
                    self._are_nested = True
                elif other is not None:
                    if other != index:
                        part.shared.append(child)
                        is_other = child not in self._below_ends and not is_leaf_node(child)
                        self._are_nested |= is_other
                elif sequence_number(child) >= self.oldest:
                    reached_from[child] = index
                    part.nodes.append(child)
                    below.append(child)
                    self._below_ends.add(child)
                else:
                    self._left_out.append(child)

    def may_hide_an_end(self, reached: Collection[Node]) -> bool:
        """Return whether what was left out may lead to an end: all has to be walked."""
        if self._are_nested:
            return True
        # An end that was reached might be below another, too, but through what other threads made.
        # To exclude that, what each step of a loop adds would have to be looked through, always.
        missing = {end for end in self.ends if end not in reached}
        return bool(missing) and any(self.leads_to(node, missing) for node in self._left_out)

    @cached_property
    def _marks_are_valid(self) -> bool:
        """Whether no end is below a marked node, as an older one may be."""
        return not any(_LEADS_BACK in metadata(end) for end in self.ends)

    def leads_to(self, top: Node, ends: Collection[Node]) -> bool:
        """Return whether an old node leads to one of these ends."""
        # Nodes that were looked through are marked, with all that is below: nothing that is made
        # later is there, and each node of a long loop is looked at once.
        seen, nodes = {top}, [top]
        if self._marks_are_valid and _LEADS_BACK in metadata(top):
            return False
        for node in nodes:  # the list grows meanwhile
            for child, _ in node.next_functions:
                if child is None or child in seen or is_leaf_node(child):
                    continue
                if child in ends:
                    return True
                if not (self._marks_are_valid and _LEADS_BACK in metadata(child)):
                    seen.add(child)
                    nodes.append(child)
        for node in nodes:
            metadata(node)[_LEADS_BACK] = True
        avoid_recursion(nodes)
        return False


_NO_BOUNDS = _Bounds(frozenset())
_LEADS_BACK = "gradkit: leads to nothing newer"


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
    def parts(self) -> list[OwnNodes]:
        """For each root the nodes that it reaches, and no later root does."""
        return own_nodes_of_each(self.roots, self.stop, self.ends)

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
        # The pass executes the nodes above a variable, or above one of the `extra` nodes. At the
        # variables' own nodes the engine only captures.
        key = (*map(id, variables), *extra)
        if key not in self._leading:
            if self.leads_only_to(variables):  # each node leads to a leaf
                self._leading[key] = self.nodes.difference(leaf_nodes(self.nodes))
            else:
                self._leading[key] = self._walk_up(variables, extra)
        return self._leading[key]

    def leads_only_to(self, variables: Sequence[Tensor]) -> bool:
        """Return whether every leaf is one of these variables, and the graph is whole."""
        is_whole = not self.ends and not self.stop
        return is_whole and self.leaves.keys() <= set(map(id, variables))

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
