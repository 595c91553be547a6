"""The gradients of each loss, the shortest way: ordinary 0-dim losses, and plain leaf tensors.

As in `plain_pass`, results and errors are those of the long way, from fewer calls of Python
functions. The graph is walked once, and what its nodes have saved is read once: to see that it is
there before any pass runs, and to drop it after its last one
[tests/eager/test_plain_separate_passes.py].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._autograd.engine import run_plainly
from gradkit._autograd.graph_release import drop
from gradkit._autograd.pass_runner import PassRunner
from gradkit._autograd.plain_pass import have_hooks, is_plain
from gradkit._checks.modified_gradients import grad_versions, inputs_of_functions
from gradkit._checks.reachability import require_reached
from gradkit._compat.dynamo import overwrites_saved_tensors
from gradkit._compat.nodes import all_saved, names_by_kind
from gradkit._compat.transforms import is_differentiated_tensor
from gradkit._core.call import Call, Grads, Pass
from gradkit._core.graph import Subgraph
from gradkit._core.graph_walk import nodes_executed
from gradkit._core.losses import Losses
from gradkit._core.ownership import owned_of_each
from gradkit._core.params import Params
from gradkit._core.tensor_nodes import is_leaf_node, leaf_nodes, leaf_of
from gradkit._core.user_code import functions_alive, hooks_registered

_dtype, _device = attrgetter("dtype"), attrgetter("device")
_requires_grad, _retains_grad = attrgetter("requires_grad"), attrgetter("retains_grad")
_ORDINARY = {Tensor}


def are_plain(losses: Sequence[Any]) -> bool:
    """Return whether these are ordinary 0-dim losses, and nothing around sees to their passes."""
    return (
        bool(losses)
        and is_plain(losses[0])
        and set(map(type, losses)) == _ORDINARY
        and not any(map(Tensor.dim, losses))
        and all(map(_requires_grad, losses))
        and not any(map(_retains_grad, losses))
        and all(dtype.is_floating_point for dtype in set(map(_dtype, losses)))
        and not any(map(is_differentiated_tensor, losses))
    )


def plain_separate_grads(losses: Losses, each: Sequence[Params]) -> list[Grads] | None:
    """Return the gradients of each loss with respect to its params; None if these are not plain."""
    different = list(dict(zip(map(id, each), each, strict=True)).values())
    variables = list(chain.from_iterable(params.variables for params in different))
    if not all(params.plain_leaves and params.all_variables for params in different):
        return None
    hooked, functions = hooks_registered(), functions_alive()
    if functions.refused or (hooked and have_hooks(variables)):
        return None
    find = _parts_for_one if len(different) == 1 else _parts_for_each
    parts = find(losses.leaves, each, users=functions.users)
    if parts is None:
        return None
    may_write = hooked or functions.users
    call = partial(_call, losses, each)
    seed = None if may_write else _common_seed(losses.leaves)
    results: list[Grads] = []
    for loss, params, part in zip(losses.leaves, each, parts, strict=True):
        grads = run_plainly(loss, params.variables, part.retain, False, call, seed)
        if may_write and (versions := grad_versions(params.variables, grads, ())):
            PassRunner(call()).refuse_modified([loss], params.variables, versions)
        results.append(grads)
        if part.retain:
            drop(part.saved)
    if _any_missing(results, common=len(different) == 1):
        require_reached(call(), results)
    del grads  # which only the list of results may refer to
    return owned_of_each(results, [params.variables for params in each])


class _GraphPart(NamedTuple):
    """What the pass of one loss executes, and no later one does."""

    retain: bool  # a later pass executes some of the same nodes
    saved: list[Any]  # what its nodes have saved, as torch wraps it
    nodes: Collection[Node]  # in whose memory that is


def _parts_for_one(
    losses: Sequence[Tensor], each: Sequence[Params], *, users: bool
) -> list[_GraphPart] | None:
    """Return the part of each loss, all for the same params; None if the long way has to look."""
    # `users`: there may be custom Functions.
    below = Subgraph(losses)
    executed: list[list[Node]] = [part.nodes for part in below.parts]
    every = list(chain.from_iterable(executed))
    variables = each[0].variables
    if not set(map(id, map(leaf_of, leaf_nodes(every)))) <= set(map(id, variables)):
        leading = below.leading_to(variables)
        executed = [[node for node in nodes if node in leading] for nodes in executed]
    retain = [not all(map(is_leaf_node, part.shared)) for part in below.parts]
    return _with_what_is_saved(every, executed, retain, users=users)


def _parts_for_each(
    losses: Sequence[Tensor], each: Sequence[Params], *, users: bool
) -> list[_GraphPart] | None:
    """Return the part of each loss, for its own params; None if the long way has to look."""
    every: set[Node] = set()
    parts: list[Collection[Node]] = []
    retain: list[bool] = []
    later: set[Node] = set()  # what later passes execute
    for loss, params in zip(reversed(losses), reversed(each), strict=True):
        nodes, executed = nodes_executed(loss, set(map(id, params.variables)))
        every.update(nodes)
        parts.append(executed - later)
        retain.append(not executed.isdisjoint(later))
        later |= executed
    return _with_what_is_saved(every, parts[::-1], retain[::-1], users=users)


def _with_what_is_saved(
    every: Collection[Node],
    executed: Sequence[Collection[Node]],
    retain: Sequence[bool],
    *,
    users: bool,
) -> list[_GraphPart] | None:
    """Return the parts of these nodes; None if one is freed, can run only once, or is a user's."""
    kinds = set(map(type, every))
    names_of = names_by_kind(kinds)
    if any(map(overwrites_saved_tensors, names_of)):
        return None
    # A Function that makes the gradient of a leaf itself may write on it later.
    if users and any(map(is_leaf_node, inputs_of_functions(every, kinds))):
        return None
    parts: list[_GraphPart] = []
    for nodes, keep in zip(executed, retain, strict=True):
        saved = all_saved(nodes, names_of)
        if saved is None:
            return None
        parts.append(_GraphPart(keep, saved, nodes))
    return parts


def _common_seed(losses: Sequence[Tensor]) -> Tensor | None:
    """Return ones like each of 0-dim losses; None if they are of several kinds."""
    is_common = len(set(map(_dtype, losses))) == len(set(map(_device, losses))) == 1
    return torch.ones_like(losses[0]) if is_common else None


def _any_missing(results: Sequence[Grads], *, common: bool) -> bool:
    """Return whether some variable has a gradient of no loss; `common`: they are of all losses."""
    if not common:
        return type(None) in set(map(type, chain.from_iterable(results)))
    missing: Sequence[int] = range(len(results[0]))
    for grads in results:
        missing = [index for index in missing if grads[index] is None]
    return bool(missing)


def _call(losses: Losses, each: Sequence[Params]) -> Call:
    passes = [Pass([index], params) for index, params in enumerate(each)]
    return Call(losses, losses.leaves, passes)
