"""Deep graphs, which Python has seen: their nodes are freed in order, without recursion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import local

from torch.autograd.graph import Node

from gradkit._compat.autograd import sequence_number
from gradkit._core.tensor_nodes import is_leaf_node, metadata

# A node that Python has seen is freed through Python, each inside the one above it: a chain of some
# 40,000 such nodes overflows the stack.
MOST_TO_FREE_AT_ONCE = 3_000
_HELD_BY_ONE = 1_000
_FREED_IN_ORDER = "gradkit: the next nodes below, the newest last"


def free_in_order(nodes: Sequence[Node]) -> None:
    """Let long chains of nodes be freed one after the other, the newest first."""
    # A list lets go of its items from its end, so that each node dies while the list still holds
    # those below it. In a chain one node in a thousand holds such a list of the next thousand:
    # whichever tensor of the graph outlives the others, not many nodes are above the next list. It
    # holds only what is below itself, and nothing lives longer for it.
    if _FREED_IN_ORDER in metadata(nodes[0]):
        return
    heights = _heights(nodes)
    metadata(nodes[0])[_FREED_IN_ORDER] = []
    held: set[Node] = set()
    for top, height in heights.items():
        if height and height % _HELD_BY_ONE == 0:
            band = _next_below(top, height - _HELD_BY_ONE, heights, held)
            metadata(top)[_FREED_IN_ORDER] = sorted(band, key=heights.__getitem__)


class _Growing(local):
    """What Python has seen in this thread of graphs that are looked at part by part."""

    def __init__(self) -> None:
        self.seen = 0  # nodes, since the last that were put in order
        self.newest = 0  # the number of the newest of those


_growing = _Growing()


def keep_freeable(tops: Collection[Node], seen: int) -> None:
    """Note that nodes above these have been seen, as in each step of a loop; order those below."""
    # As `free_in_order`, but all nodes since the last time are in a few lists: one for those that
    # are below the same tops, which these share. So a top holds only what is below itself.
    _growing.seen += seen
    if _growing.seen < MOST_TO_FREE_AT_ONCE:
        return
    oldest = _growing.newest
    _growing.seen, _growing.newest = 0, max(map(sequence_number, tops))
    if _growing.newest < oldest:  # those of another thread
        oldest = 0
    nodes = _reached(tops, oldest)
    above = dict.fromkeys(nodes, 0)  # for each node the tops above it, as bits
    for bit, top in enumerate(tops):
        above[top] |= 1 << bit
    for node in nodes:
        for child, _ in node.next_functions:
            if child in above:
                above[child] |= above[node]
    lists: dict[int, list[Node]] = {}
    for node in reversed(nodes):  # the newest last, which goes first
        if node not in tops:
            lists.setdefault(above[node], []).append(node)
    # What is below more tops is not above what is below fewer: it goes later.
    every = sorted(lists.items(), key=lambda item: -item[0].bit_count())
    for bit, top in enumerate(tops):
        metadata(top)[_FREED_IN_ORDER] = [held for bits, held in every if bits >> bit & 1]


def _reached(tops: Collection[Node], oldest: int) -> list[Node]:
    """Return these nodes and those below them, the newest first; without older ones, and leaves."""
    nodes = list(tops)
    reached = set(nodes)
    for node in nodes:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child is not None and child not in reached and sequence_number(child) >= oldest:
                reached.add(child)
                if not is_leaf_node(child):
                    nodes.append(child)
    return sorted(nodes, key=sequence_number, reverse=True)


def _next_below(top: Node, least: int, heights: dict[Node, int], held: set[Node]) -> list[Node]:
    """Return the nodes below one and above a height that no other holds."""
    nodes = [top]
    for node in nodes:  # which grows meanwhile
        for child, _ in node.next_functions:
            if child is not None and child not in held and heights.get(child, 0) > least:
                held.add(child)
                nodes.append(child)
    return nodes[1:]


def _heights(nodes: Sequence[Node]) -> dict[Node, int]:
    """Return for each node the length of the longest chain of these nodes that is below it."""
    heights: dict[Node, int] = {}
    every = set(nodes)
    stack = list(nodes)
    while stack:
        node = stack[-1]
        below = {child for child, _ in node.next_functions if child in every}
        missing = [child for child in below if child not in heights]
        if missing and node not in heights:
            stack += missing
            continue
        stack.pop()
        if node not in heights:
            heights[node] = max((heights[child] + 1 for child in below), default=0)
    return heights
