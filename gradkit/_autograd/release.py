"""What is freed of a graph after each of several passes: what no later one needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._compat.nodes import raise_freed, saved_names
from gradkit._core.call import Call
from gradkit._core.graph import OwnNodes, is_leaf_node, nodes_executed


class ReleasePlan(NamedTuple):
    """What one of several passes does with the graph."""

    retain: bool  # a later pass executes some of the same nodes
    last_used: Collection[Node] = ()  # if so, those that no later pass executes


def plan_release(call: Call, extra: Sequence[Node]) -> list[ReleasePlan]:
    """Return a plan for each pass, where every pass also reaches the `extra` nodes."""
    # A loss without elements has no pass of its own, so its nodes may never be executed.
    if len(call.params) == 1 and all(map(Tensor.numel, call.outputs)):
        (first,) = call.params
        below = call.whole
        if not extra and below.leads_only_to(first.variables):
            # A leaf's own node is not executed, and has nothing to release.
            goes_on = [not all(map(is_leaf_node, part.shared)) for part in below.parts]
            pairs = zip(goes_on, below.parts, strict=True)
            return [ReleasePlan(retain, part.nodes if retain else ()) for retain, part in pairs]
        return plan_parts(below.parts, below.leading_to(first.variables, extra))
    # A walk for each pass is enough here; with the general way a game of two takes 5 % longer.
    if call.only_leaves and not extra and all(map(Tensor.numel, call.outputs)):
        each = [(call.outputs[group[0]], params.variables) for group, params in call.passes]
        return plan_sets([nodes_executed(root, set(map(id, leaves))) for root, leaves in each])
    return plan_sets([
        call.graph.below(group).leading_to(
            params.variables if call.outputs[group[0]].numel() else [], extra
        )
        for group, params in call.passes
    ])


def plan_sets(executed: Sequence[set[Node]]) -> list[ReleasePlan]:
    """Return the plans of passes that execute these nodes."""
    later: set[Node] = set()
    plans: list[ReleasePlan] = []
    for nodes in reversed(executed):
        shared = not nodes.isdisjoint(later)
        plans.append(ReleasePlan(shared, nodes - later if shared else ()))
        later |= nodes
    return plans[::-1]


def plan_parts(parts: Sequence[OwnNodes], executed: set[Node]) -> list[ReleasePlan]:
    """Return the plans of passes that execute all of these nodes that are below their losses."""
    # Whatever is below a node that a later pass executes, that pass executes, too.
    return [
        ReleasePlan(True, [node for node in part.nodes if node in executed])
        if not executed.isdisjoint(part.shared)
        else ReleasePlan(False)
        for part in parts
    ]


def release(nodes: Iterable[Node], names_of: Mapping[type, tuple[str, ...]] | None = None) -> None:
    """Drop the tensors that these nodes have saved, as the engine does without `retain_graph`."""
    # `names_of`: by `names_by_kind`, where that is known. Python cannot tell a node to release its
    # tensors, but it can give each a pack hook, which replaces the tensor by what the hook returns.
    # A tensor that has hooks already (a checkpoint's, or one kept on another device) cannot have
    # others: it stays until its graph is freed.
    for node in nodes:
        kind = type(node)
        for name in saved_names(kind) if names_of is None else names_of.get(kind, ()):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # a custom Function that has lost its tensors
                continue
            for tensor in saved if isinstance(saved, tuple) else (saved,):
                try:
                    if tensor.data is not None:  # to raise takes torch a tenth of a millisecond
                        tensor.register_hooks(lambda _: None, raise_freed)
                except RuntimeError:  # a tensor with hooks takes no others
                    continue
