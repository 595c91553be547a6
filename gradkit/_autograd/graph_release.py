"""How long the passes of a call need each part of the graph, and freeing it with its last pass.

`retain_graph=False` frees what its own pass executes, so a loop that retains all but the last pass
leaves the heads of the other losses alive [E2, E4].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core import graph
from gradkit._core.call import Call


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """What one of several passes does with the graph.

    Attributes:
        retain: Whether to retain it: a later pass executes some of the same nodes.
        last_used: If so, the nodes that no later pass executes.
    """

    retain: bool
    last_used: set[Node] = field(default_factory=set)


def plan_release(call: Call, extra: Sequence[Node]) -> list[ReleasePlan]:
    """Return a plan for each pass, where every pass also reaches the `extra` nodes."""
    first = call.passes[0].params
    # A loss without elements has no pass of its own.
    same_params = all(one.params is first for one in call.passes) and all(
        call.outputs[one.losses[0]].numel() for one in call.passes
    )
    leading: set[Node] = set()
    if same_params:
        leading = call.graph.below(call.differentiated).leading_to(first.variables, extra)
    needed_later: set[Node] = set()
    plans: list[ReleasePlan] = []
    for group, params in reversed(call.passes):
        root = call.outputs[group[0]]
        if same_params:
            # Below a node that a later pass executes, that pass executes all that leads on.
            executed, shared = _walk(root, leading, needed_later)
        else:
            variables = params.variables if root.numel() else []
            executed = call.graph.below(group).leading_to(variables, extra)
            shared = not executed.isdisjoint(needed_later)
        plans.append(ReleasePlan(shared, executed - needed_later if shared else set()))
        needed_later |= executed
    return plans[::-1]


def _walk(root: Tensor, within: set[Node], stop: set[Node]) -> tuple[set[Node], bool]:
    """Return the nodes below a root inside one set and above another, and whether it met that."""
    start = graph.edge(root).node
    if start in stop:
        return set(), True
    seen = {start} & within
    stack, met = list(seen), False
    while stack:
        for node, _ in stack.pop().next_functions:
            if node in stop:
                met = True
            elif node in within and node not in seen:
                seen.add(node)
                stack.append(node)
    return seen, met


def release(nodes: Iterable[Node]) -> None:
    """Drop the tensors that these nodes have saved, as the engine does without `retain_graph`.

    Python cannot tell a node to release its tensors, but it can give each a pack hook, which
    replaces the tensor by what the hook returns. A tensor that has hooks already (of a checkpoint,
    or one kept on another device) cannot have others: it stays until its graph is freed.
    """
    for node in nodes:
        for name in graph.saved_names(type(node)):
            with suppress(RuntimeError):  # a custom Function that has lost its tensors raises here
                saved = getattr(node, name)
                for tensor in saved if isinstance(saved, tuple | list) else (saved,):
                    with suppress(RuntimeError):  # it has hooks, is lost already, or is None
                        tensor.register_hooks(_drop, graph.raise_freed)


def _drop(_: Tensor) -> None:
    return None
