"""The common call, the shortest way: one ordinary loss, and params that are plain leaf tensors.

A call costs as much as the Python functions that it runs through, most of all around a large pass,
which leaves none of their code in the caches. So where nothing needs the checks of `PassRunner`,
this does without. Results and errors are the same [tests/eager/test_plain_pass.py].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import Any, TypeGuard

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._autograd.engine import run_backward_plainly, run_plainly
from gradkit._autograd.pass_runner import PassRunner
from gradkit._autograd.passes import grads_to_tree
from gradkit._checks.eager_graph import check_backward_to_leaves
from gradkit._checks.higher_derivatives import may_be_wrong
from gradkit._checks.modified_gradients import grad_versions
from gradkit._checks.reachability import require_reached
from gradkit._checks.recomputations import refuse_other_tensors
from gradkit._checks.steps_without_grads import open_monitors
from gradkit._compat.autograd import is_view, tensor_hooks
from gradkit._compat.checkpoints import IDLE, RECOMPUTING
from gradkit._compat.distributed import any_fully_sharded
from gradkit._compat.transforms import is_ordinary
from gradkit._core.call import Call, Pass, lone_loss
from gradkit._core.grad_recorder import observers
from gradkit._core.graph import is_freed, is_leaf_node, kinds_in_short_pass, nodes_of_types
from gradkit._core.ownership import owned
from gradkit._core.params import NO_PARAMS, Params
from gradkit._core.pytree import PyTree, unflatten
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
    call = partial(_call, loss, params, create_graph)
    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        refuse_other_tensors([loss], call)
    grads = run_plainly(loss, variables, create_graph, create_graph, call)
    if (hooked or functions.users) and (versions := grad_versions(variables, grads, ())):
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
    call = partial(_call, loss, NO_PARAMS, False)
    if is_freed(loss):
        check_backward_to_leaves(call())  # which raises
    if [*map(getrefcount, RECOMPUTING)] != IDLE:
        refuse_other_tensors([loss], call)
    run_backward_plainly(loss, call)
    return loss.detach().clone()


def _call(loss: Tensor, params: Params, create_graph: bool) -> Call:
    return Call(lone_loss(loss), [loss], [Pass([0], params)], create_graph=create_graph)


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
