"""The passes of common calls, the shortest way: ordinary losses, and plain leaf tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from sys import getrefcount
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._autograd.engine import run_backward_plainly, run_plainly
from gradkit._autograd.passes import (
    PassRunner,
    ReleasePlan,
    grads_to_tree,
    plan_parts,
    plan_sets,
    release,
)
from gradkit._checks.checked import open_monitors
from gradkit._checks.eager_graph import check_backward_to_leaves
from gradkit._checks.higher_derivatives import KINDS, may_be_wrong
from gradkit._checks.modified_tensors import grad_versions, inputs_of_functions
from gradkit._checks.reachability import require_reached
from gradkit._checks.recomputations import refuse_other_tensors
from gradkit._compat.autograd import is_view, tensor_hooks
from gradkit._compat.checkpoints import IDLE, RECOMPUTING
from gradkit._compat.distributed import any_fully_sharded
from gradkit._compat.dynamo import overwrites_saved_tensors
from gradkit._compat.nodes import DRAW_AFTER_SAVING, any_released, names_by_kind
from gradkit._compat.transforms import is_differentiated_tensor, is_ordinary
from gradkit._core.call import Call, Grads, Losses, Pass
from gradkit._core.grad_recorder import observers
from gradkit._core.graph import (
    Subgraph,
    is_freed,
    is_leaf_node,
    kinds_in_short_pass,
    leaf_nodes,
    leaf_of,
    nodes_executed,
    nodes_of_types,
)
from gradkit._core.ownership import owned, owned_of_each
from gradkit._core.params import NO_PARAMS, Params
from gradkit._core.pytree import PyTree, flatten, unflatten
from gradkit._core.user_code import (
    first_pre_hooked,
    functions_alive,
    hooks_registered,
    most_nodes_of_users,
)
from gradkit._state.recomputed_tensors import recomputed_tensor_sources

_version, _retains_grad = attrgetter("_version"), attrgetter("retains_grad")
_SHORT = 300  # nodes


def is_plain(loss: Any) -> TypeGuard[Tensor]:
    """Return whether this is an ordinary loss, and nothing around the call sees to its pass."""
    # Hooks may have been registered, and Functions defined: what they ask for is seen to below.
    return (
        type(loss) is Tensor
        and loss.requires_grad
        and loss.numel() == 1
        and loss.dtype.is_floating_point
        and not loss.retains_grad
        and not (observers.active or open_monitors or recomputed_tensor_sources)
        and is_ordinary(loss)
        and not any_fully_sharded()
        and not (loss._version and is_view(loss))  # it may have lost its history
    )


def plain_value_and_grads(
    loss: Tensor, params: Params, create_graph: bool
) -> tuple[Tensor, PyTree] | None:
    """Return the value and gradients of a plain loss; None if the rest is not as plain."""
    variables = params.variables
    has_all = len(variables) == len(params.leaves)
    if not (variables and params.no_subclasses and (has_all or params.no_ties)):
        return None
    hooked, functions = hooks_registered(), functions_alive()
    if functions.refused or (functions.users and (create_graph or functions_take_leaves(loss))):
        return None
    if not (params.only_leaves or (create_graph and _are_plain_values(variables))):
        return None
    if hooked and have_hooks(variables):
        return None
    if create_graph and not _is_differentiable(loss, params):
        return None
    call = partial(_call_for, loss, params, create_graph)
    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        refuse_other_tensors([loss], call)
    grads = run_plainly(loss, variables, create_graph, create_graph, call)
    # Asked after the pass, which may itself have registered the first hook of the process.
    may_write = functions.users or hooks_registered()
    if may_write and (versions := grad_versions(variables, grads, ())):
        PassRunner(call()).refuse_modified([loss], variables, versions)
    if type(None) in set(map(type, grads)):
        require_reached(call(), [grads])
    if create_graph:
        return loss, grads_to_tree(grads, params, "none", create_graph)
    grads = owned(grads, variables)
    by_leaf = grads if has_all else params.per_leaf(grads)
    return loss.detach().clone(), unflatten(params.spec, by_leaf)


def plain_backward(loss: Tensor) -> Tensor:
    """Accumulate the gradients of a plain loss into `.grad`, and return its value."""
    call = partial(_call_for, loss, NO_PARAMS, False)
    if is_freed(loss):
        check_backward_to_leaves(call())  # which raises
    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        refuse_other_tensors([loss], call)
    run_backward_plainly(loss, call)
    return loss.detach().clone()


def _call_for(loss: Tensor, params: Params, create_graph: bool) -> Call:
    return Call(Losses(*flatten(loss)), [loss], [Pass([0], params)], create_graph=create_graph)


def have_hooks(leaves: Sequence[Tensor]) -> bool:
    """Return whether a leaf has a hook of its own, on its tensor or on its node."""
    return any(map(tensor_hooks, leaves)) or first_pre_hooked(leaves) is not None


def functions_take_leaves(loss: Tensor) -> bool:
    """Return whether a custom Function in the graph makes the gradient of a leaf itself."""
    functions = nodes_of_types(loss, most_nodes_of_users())
    return any(
        child is not None and is_leaf_node(child)
        for node in functions
        for child, _ in node.next_functions
    )


def _are_plain_values(variables: list[Tensor]) -> bool:
    """Return whether intermediate values are no views, unchanged, and do not retain gradients."""
    return not (
        any(map(_version, variables))
        or any(map(_retains_grad, variables))
        or any(map(is_view, variables))
    )


def _is_differentiable(loss: Tensor, params: Params) -> bool:
    """Return whether torch is known to get the derivative of a pass right; False if not sure."""
    # The pass of a step in a loop is short, and this look at it, too.
    ends: set[Node] = set()
    if not params.only_leaves:
        ends = {variable.grad_fn for variable in params.variables if variable.grad_fn is not None}
        if len(ends) < len(params.variables):
            return False
    kinds = kinds_in_short_pass(loss, ends, _SHORT)
    return kinds is not None and not may_be_wrong(kinds)


_dtype, _device, _layout = map(attrgetter, ("dtype", "device", "layout"))
_requires_grad = attrgetter("requires_grad")
_ORDINARY = {Tensor}
# Passes after which gradients are looked at together. What they may share lives until then.
_TOGETHER = 4


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
    if not all(one.variables and one.plain_leaves and one.no_ties for one in different):
        return None
    hooked, functions = hooks_registered(), functions_alive()
    if functions.refused or (hooked and have_hooks(variables)):
        return None

    def call() -> Call:
        passes = [Pass([index], params) for index, params in enumerate(each)]
        return Call(losses, losses.leaves, passes)

    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        refuse_other_tensors(losses.leaves, call)
    common = len(different) == 1
    find = _plans_for_one if common else _plans_for_each
    try:
        nodes, plans = find(losses.leaves, each)
    except RuntimeError:  # of a loss that has lost its history: the long way names it
        return None
    kinds = set(map(type, nodes))
    if kinds & KINDS:  # the long way looks at their values
        return None
    names_of = names_by_kind(kinds)
    if kinds & DRAW_AFTER_SAVING or any(map(overwrites_saved_tensors, names_of)):
        return None
    if any_released(nodes, names_of):
        return None
    # A Function that makes the gradient of a leaf itself may write on it later.
    if functions.users and any(map(is_leaf_node, inputs_of_functions(nodes, kinds))):
        return None
    may_write = hooked or functions.users
    seed = None if may_write else _common_seed(losses.leaves)
    # A hook of the next pass may write on what it has kept of this one.
    together = 1 if may_write else _TOGETHER
    results: list[Grads] = []
    passes = zip(losses.leaves, each, plans, strict=True)
    while some := list(islice(passes, together)):
        grads = [_pass(*one, names_of, may_write, seed, call) for one in some]
        results += owned_of_each(grads, [params.variables for _, params, _ in some])
    if _any_missing(results, common=common):
        require_reached(call(), results)
    return results


def _pass(
    loss: Tensor,
    params: Params,
    plan: ReleasePlan,
    names_of: Mapping[type, tuple[str, ...]],
    may_write: bool,
    seed: Tensor | None,
    call: Callable[[], Call],
) -> Grads:
    """Return the gradients of one pass, which may share memory; release what no later one needs."""
    grads = run_plainly(loss, params.variables, plan.retain, False, call, seed)
    may_write = may_write or hooks_registered()  # the pass may have registered one
    if may_write and (versions := grad_versions(params.variables, grads, ())):
        PassRunner(call()).refuse_modified([loss], params.variables, versions)
    if plan.retain:
        release(plan.last_used, names_of)
    return grads


def _plans_for_one(
    losses: Sequence[Tensor], each: Sequence[Params]
) -> tuple[Collection[Node], list[ReleasePlan]]:
    """Return the nodes below losses, and a plan for the pass of each, all for the same params."""
    below = Subgraph(losses)
    nodes = list(chain.from_iterable(part.nodes for part in below.parts))
    variables = each[0].variables
    if set(map(id, map(leaf_of, leaf_nodes(nodes)))) <= set(map(id, variables)):
        # Each node leads to one. A leaf's own is not executed, and has nothing to release.
        return nodes, [
            ReleasePlan(not all(map(is_leaf_node, part.shared)), part.nodes) for part in below.parts
        ]
    return nodes, plan_parts(below.parts, below.leading_to(variables))


def _plans_for_each(
    losses: Sequence[Tensor], each: Sequence[Params]
) -> tuple[Collection[Node], list[ReleasePlan]]:
    """Return the same, for the params of each loss."""
    ids = [set(map(id, params.variables)) for params in each]
    nodes, executed = zip(*map(nodes_executed, losses, ids), strict=True)
    return set().union(*nodes), plan_sets(executed)


def _common_seed(losses: Sequence[Tensor]) -> Tensor | None:
    """Return ones like each of 0-dim losses; None if they are of several kinds."""
    kinds = [set(map(read, losses)) for read in (_dtype, _device, _layout)]
    return torch.ones_like(losses[0]) if all(len(kind) == 1 for kind in kinds) else None


def _any_missing(results: Sequence[Grads], *, common: bool) -> bool:
    """Return whether some variable has a gradient of no loss; `common`: they are of all losses."""
    if not common:
        return type(None) in set(map(type, chain.from_iterable(results)))
    missing: Sequence[int] = range(len(results[0]))
    for grads in results:
        missing = [index for index in missing if grads[index] is None]
    return bool(missing)
