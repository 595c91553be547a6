"""How long several passes need each part of a graph, and letting go of what none needs any more.

`retain_graph=False` frees what its own pass executes, so a loop that retains all but the last pass
leaves the heads of the other losses alive [E2, E4]. Here each part goes with its last pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import graph, saved_tensors


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What a pass owes the passes after it.

    Attributes:
        retain: A later pass executes some of the same nodes.
        own: If so, the nodes that no later pass executes.
    """

    retain: bool
    own: set[Node] = field(default_factory=set)


def shares(
    roots: Sequence[Tensor], variables: Sequence[Sequence[Tensor]], further: Sequence[Node]
) -> list[ReleasePlan]:
    """Return for each of several passes what it must retain and what it can let go.

    Args:
        roots: The loss of each pass, in the order in which they run.
        variables: The tensors whose gradients each pass wants; one and the same list if all want
            the same.
        further: Nodes that every pass is to reach, too.

    Returns:
        One share a pass; the last one retains nothing.
    """
    alike = all(wanted is variables[0] for wanted in variables)
    leading: set[Node] = set()
    if alike:
        leading = graph.leading_to(variables[0], graph.nodes_below(roots), further)
    needed_later: set[Node] = set()
    found: list[ReleasePlan] = []
    for root, wanted in zip(reversed(roots), reversed(variables), strict=True):
        if alike:
            # Below a node that a later pass executes, that pass executes all that leads on.
            executed, meets = _walk(root, leading, needed_later)
        else:
            executed = graph.leading_to(wanted, graph.nodes_below([root]), further)
            meets = not executed.isdisjoint(needed_later)
        found.append(ReleasePlan(meets, executed - needed_later if meets else set()))
        needed_later |= executed
    return found[::-1]


def _walk(root: Tensor, within: set[Node], stop: set[Node]) -> tuple[set[Node], bool]:
    start = graph.edge(root).node
    if start in stop:
        return set(), True
    seen = {start} & within
    stack, meets = list(seen), False
    while stack:
        for node, _ in stack.pop().next_functions:
            if node in stop:
                meets = True
            elif node in within and node not in seen:
                seen.add(node)
                stack.append(node)
    return seen, meets


def release(nodes: Iterable[Node]) -> None:
    """Drop the tensors that these nodes have saved, as the engine does without `retain_graph`.

    Python cannot tell a node to release its tensors, but it can give each a pack hook, which
    replaces the tensor by what the hook returns. A tensor that has hooks already (of a checkpoint,
    or one kept on another device) cannot have others: it stays until its graph goes.

    Args:
        nodes: Nodes that no further pass needs.
    """
    for node in nodes:
        for name in saved_tensors.saved_names(type(node)):
            with suppress(RuntimeError):  # a custom Function that has lost its tensors raises here
                saved = getattr(node, name)
                for tensor in saved if isinstance(saved, tuple | list) else (saved,):
                    with suppress(RuntimeError):  # it has hooks, is lost already, or is None
                        tensor.register_hooks(_drop, saved_tensors.gone)


def _drop(_: Tensor) -> None:
    return None
