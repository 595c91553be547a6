"""What a call is checked for, before anything has run."""

from __future__ import annotations

from collections.abc import Collection

from gradkit._checks import derivatives, freed, reachability, refused_nodes, sharding
from gradkit._core.call import Call


def check_call(call: Call, allowed: Collection[str] = ()) -> None:
    """Raise if a gradient of the call would be wrong, zero or local.

    `allowed` names kinds of nodes that raise otherwise, and that the caller sees to.
    """
    reachability.refuse_no_variables(call)
    if not allowed:
        for params in call.params:
            sharding.refuse_gathered(params)
    if call.create_graph:
        derivatives.refuse_wrong_derivatives(call)
    else:
        derivatives.refuse_inside_transforms(call)
    if not call.plain_leaves or call.may_hold_functions:
        _refuse_nodes(call, allowed)
    if not call.plain_leaves:
        reachability.refuse_doubtful(call)
    if call.unused == "error":
        reachability.refuse_unreached(call)
    if len(call.differentiated) > 1:
        # The pass for one loss would free the graph of another. A lone one the engine refuses.
        freed.refuse_freed(call, thorough=len(call.passes) > 1)


def _refuse_nodes(call: Call, allowed: Collection[str]) -> None:
    if not refused_nodes.refused_nodes(call.graph.below(call.differentiated).kinds, allowed):
        return
    for index in call.differentiated:
        kinds = call.graph.below([index]).kinds
        refused_nodes.refuse_nodes(kinds, call.losses.path(index), allowed)


def check_backward(call: Call) -> None:
    """Raise if `.backward()` for some params would leave `.grad` wrong, or as it was."""
    check_call(call)
    below = call.graph.below(call.differentiated)
    if not any(below.reaches(variable) for _, _, variable in call.variables()):
        reachability.refuse_nothing_reached(call)


def check_backward_to_leaves(call: Call) -> None:
    """Raise if `.backward()` for all leaves would leave `.grad` wrong, or as it was."""
    for index in call.differentiated:
        freed.refuse_freed_root(call, index)
        if call.create_graph:
            below = call.graph.below([index])
            leaves = list(below.leaves.values())
            derivatives.refuse_wrong_derivative(call.losses.path(index), leaves, below)
