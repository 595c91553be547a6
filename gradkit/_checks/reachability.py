"""Whether a gradient reaches each variable, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor

from gradkit._checks.modified_tensors import functions_above_hidden
from gradkit._compat import distributed
from gradkit._compat.autograd import may_have_node, tensor_hooks
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import any_compiled, compiled_together
from gradkit._core.call import Call, Grads, Losses, Pass
from gradkit._core.graph import Subgraph, edge, has_rebuilt_history, was_used_before_change
from gradkit._core.known_results import ZERO_DERIVATIVE_NODE
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import Params
from gradkit.errors import UnreachedParamError, UnsupportedGraphError, describe, message

_CUT = (
    "none: the loss was not computed from it, or the path is cut (detach(), .data, .item(), "
    "no_grad, another copy of the model, an in-place change after its use, a custom Function that "
    "returns None, a checkpoint with use_reentrant=True none of whose inputs requires grad)"
)


def refuse_no_variables(call: Call) -> None:
    """Raise if no tensor of the params requires grad."""
    for one in call.passes:
        if one.params.variables:
            return
    where = " and ".join(dict.fromkeys(params.root for params in call.params))
    expected = f"a path from {_names(call.losses, call.passes)}"
    got = "none: no tensor there requires grad"
    fix = "call requires_grad_() on the parameters before the forward pass; state_dict() and "
    fix += ".data are detached, so pass the module"
    if not any(leaf is not None for one in call.passes for leaf in one.params.leaves):
        got, fix = "none: no tensor there", "pass the module, or a tensor that requires grad"
    raise UnreachedParamError(message(where, expected, got, fix))


def refuse_hooked_leaf_losses(call: Call) -> None:
    """Raise if a loss is a leaf with a hook, whose own backward pass would write `.grad`."""
    hooked = [i for i in call.differentiated if call.outputs[i].is_leaf]
    hooked = [i for i in hooked if tensor_hooks(call.outputs[i])]
    variables = {id(variable) for _, _, variable in call.variables()} if hooked else set()
    for index in hooked:
        if id(call.outputs[index]) not in variables:
            got = "a leaf with a hook: what that does with its gradient, as a backward pass of the "
            got += "losses that were cached, would be left out, or written into .grad"
            fix = "gradkit.backward_(loss); or `with gradkit.capture_grads(params) as captured:` "
            fix += "around loss.backward(), then captured.grads"
            where = call.losses.path(index)
            raise UnreachedParamError(message(where, "a loss that carries a graph", got, fix))


def refuse_unreached(call: Call) -> None:
    """Raise if a pass cannot reach every variable that it is for; for `unused="error"`."""
    for one in call.passes:
        below = call.graph.below(one.losses)
        for index, variable in enumerate(one.params.variables):
            if not (below.reaches(variable) or functions_above_hidden(call, [variable])):
                raise UnreachedParamError(unreached_message(call.losses, [one], index))


def refuse_unreached_views_and_subclasses(call: Call) -> None:
    """Raise if a variable that is no plain leaf is unreached for a reason that hides a gradient."""
    doubtful = [
        (params, index, variable)
        for params, index, variable in call.variables()
        if type(variable) not in PLAIN_TYPES or variable._base is not None or variable._version
    ]
    if not doubtful:
        return
    # The graph is walked to its end: tensors that took the places of these may be older than they.
    below = Subgraph([call.outputs[index] for index in call.differentiated])
    listed = {id(variable) for _, _, variable in call.variables()}
    for params, index, variable in doubtful:
        if below.reaches(variable):
            continue
        if _is_view_of_reached(variable, below, listed):
            raise UnreachedParamError(_replaced(params, index, "a view of one, made separately"))
        if was_used_before_change(variable, below.nodes):
            raise UnreachedParamError(_replaced(params, index, "a later value of one"))
        if type(variable) not in PLAIN_TYPES and is_fsdp_shard(variable):
            expected, got = "a parameter that the losses reach", "a DTensor that they do not: the "
            got += "parameters of a fully_shard module are not in the graph"
            fix = "call gradkit.distributed.value_and_grads(losses, module)"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))


def refuse_compiled_together(call: Call) -> None:
    """Raise if a value has left a compiled function together with what was made of it."""
    for losses, params in call.passes:
        for index, variable in enumerate(params.variables):
            if not any_compiled([type(variable.grad_fn)]):
                continue
            below = call.graph.below(losses)
            if variable.grad_fn in below.nodes and not below.reaches(variable):
                where, what = params.path(index), _names(call.losses, [Pass(losses, params)])
                raise UnsupportedGraphError(message(where, *compiled_together(what)))


def _is_view_of_reached(variable: Tensor, below: Subgraph, listed: set[int]) -> bool:
    """Return whether a view is a new variable, and the gradient arrives at its base instead."""
    # A slice of a parameter is a new variable each time it is taken [C3]; a view gets another
    # history when its base changes in place, as_strided [L2]. If the base is listed, too, the
    # gradient stands there, and the view may be None. So may any other view of an intermediate
    # value, whose losses may be others.
    base = variable._base
    return (
        base is not None
        and (base.is_leaf or has_rebuilt_history(variable))
        and id(base) not in listed
        and variable.grad_fn not in below.nodes
        and base.requires_grad
        and below.reaches(base)
    )


def _replaced(params: Params, index: int, got: str) -> str:
    return message(
        params.path(index),
        "a tensor that the losses were computed from",
        f"{got}, or changed in place since: no gradient can arrive there",
        "pass the tensor itself and index its gradient; change a copy, h + 1, and not h itself",
    )


def require_reached(call: Call, results: Sequence[Grads], unused: str | None = None) -> None:
    """Raise if the passes gave no gradient at all, or not every one under `unused="error"`."""
    if (unused or call.unused) == "error":
        for grads, one in zip(results, call.passes, strict=True):
            unfilled = [index for index, grad in enumerate(grads) if grad is None]
            if unfilled:  # a custom Function in the graph has returned None
                raise UnreachedParamError(unreached_message(call.losses, [one], unfilled[0]))
    if len(results) == 1 and type(None) not in set(map(type, results[0])):
        return  # the answer is that of the code below, and faster
    refuse_cast_since_forward(call, results)
    if any(grad is not None for grads in results for grad in grads):
        return
    for one in call.passes:
        executed = call.graph.below(one.losses).leading_to(one.params.variables)
        if ZERO_DERIVATIVE_NODE in set(map(type, executed)):
            return  # a constant gradient, as of a linear function, has None
    refuse_nothing_reached(call)


def refuse_cast_since_forward(call: Call, results: Sequence[Grads]) -> None:
    """Raise if torch has another leaf in the graph than one without a gradient, or left it out."""
    # torch leaves out some uses of one of inference mode. One that was moved or cast since, its
    # `.data` replaced, has another node for gradients to arrive at, apart from the graph:
    # torch.autograd.grad reports it as unused, and `.backward()` fills the `.grad` of the old type.
    for params, index in _without_gradient(call, results):
        variable = params.variables[index]
        if variable.is_inference():
            got = f"{describe(variable)} made inside: torch leaves uses of it out of the graph"
            fix = "make the model outside of torch.inference_mode(); to run it without gradients, "
            fix += "enter that around the forward pass"
            expected = "a parameter made outside of inference mode"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))
        if not may_have_node(variable):  # no graph holds it: the call's need not be walked
            continue
        below = call.whole
        if id(variable) in below.leaves and edge(variable).node not in below.nodes:
            expected = "the parameter as it was when the losses were computed"
            got = f"{describe(variable)}, moved or cast since"
            fix = "call .to(), .double(), ... on the model before the forward pass"
            raise UnreachedParamError(message(params.path(index), expected, got, fix))


def _without_gradient(call: Call, results: Sequence[Grads]) -> list[tuple[Params, int]]:
    """Return the leaves that have no gradient of any pass."""
    if len(call.params) == 1:
        unfilled: Sequence[int] = range(len(call.params[0].variables))
        for grads in results:
            unfilled = [index for index in unfilled if grads[index] is None]
        if not unfilled:
            return []  # each variable has a gradient of some loss
    missing: dict[int, tuple[Params, int]] = {}
    arrived: set[int] = set()
    for grads, (_, params) in zip(results, call.passes, strict=True):
        for index, (variable, grad) in enumerate(zip(params.variables, grads, strict=True)):
            if grad is not None:
                arrived.add(id(variable))
            elif variable.grad_fn is None:
                missing.setdefault(id(variable), (params, index))
    return [pair for key, pair in missing.items() if key not in arrived]


def refuse_nothing_reached(call: Call) -> NoReturn:
    """Raise, since no variable of a call is reached."""
    raise UnreachedParamError(unreached_message(call.losses, call.passes, 0))


def unreached_message(losses: Losses, passes: Sequence[Pass], variable: int) -> str:
    """Return the message for a variable of the first pass that has any, which no loss reaches."""
    where = next(params.path(variable) for _, params in passes if params.variables)
    roots = [losses.leaves[index] for group, _ in passes for index in group]
    if not any(root.requires_grad for root in roots):
        got, fix = "none: the loss is a constant", "leave it out, or allow it: unused='none'"
    elif all(root.grad_fn is None for root in roots):
        got = f"none: the {losses.root} are leaf tensors, such as parameters"
        fix = f"the arguments are ({losses.root}, params), in this order: pass the loss first"
    else:
        got, fix = _CUT, "compute the losses from these very tensors, or leave them out of params"
    return message(where, f"a path from {_names(losses, passes)}", got, fix)


def _names(losses: Losses, passes: Sequence[Pass]) -> str:
    return ", ".join(losses.path(index) for group, _ in passes for index in group[:3])


def refuse_gathered(params: Params) -> None:
    """Raise if params are those of a `fully_shard` module between its forward and backward."""
    gathered = gathered_params()
    for index, variable in enumerate(params.variables if gathered else ()):
        if id(variable) in gathered:
            expected = "a parameter of this process, or a shard of one"
            got = "one that fully_shard has gathered for the backward pass: its gradient would not "
            got += "be reduced, and its .grad is that of no shard"
            fix = "gradkit.distributed.value_and_grads(losses, module); or make the call before "
            fix += "the forward pass, or after the backward pass"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))


def refuse_unrecorded(leaves: Sequence[Tensor], where: Callable[[], str]) -> None:
    """Raise if `.backward(create_graph=True)` would leave some leaf a `.grad` without a graph."""
    gathered, ids = gathered_params(), set(map(id, leaves))
    if not ids.isdisjoint(gathered):
        got, fix = "those of a fully_shard module", "gradkit.distributed.make_functional(module)"
    elif distributed.replicas_of(leaves, now=True):
        got = "those of a DistributedDataParallel module, which reduces without a graph"
        fix = "gradkit.distributed.value_and_grads(losses, module, create_graph=True)"
    else:
        return
    expected = "parameters of this process, for a .grad that has a graph"
    raise UnsupportedGraphError(message(where(), expected, got, fix))


def is_fsdp_shard(variable: Tensor) -> bool:
    """Return whether this is a parameter of a `fully_shard` module."""
    if not is_dtensor(variable):
        return False
    # A DTensor may be of another kind: those of `distributed.make_functional` may be unused.
    each = map(distributed.module_params, distributed.all_shards())
    return any(variable is param for params in each for param in params)


def gathered_params() -> set[int]:
    """Return the ids of the unsharded parameters into which `fully_shard` gathers shards."""
    # A module may show them as its parameters until the backward pass has ended: plain tensors, in
    # a graph that need not hold a node of `fully_shard`. Their gradients are not synchronized [M9].
    gathered = map(distributed.unsharded_param, distributed.all_shards())
    return {id(param) for param in gathered if param is not None}
