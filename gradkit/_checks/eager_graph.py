"""What the graph of an eager call is checked for, before anything has run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, reduce
from operator import or_

from gradkit._checks import higher_derivatives, reachability, recomputations
from gradkit._checks.circumstances import (
    CHANGED,
    CHECKPOINTS,
    COMPILED_VALUES,
    CONSTANT,
    CREATES_GRAPH,
    FUNCTIONS,
    HOOKS,
    INCOMPLETE,
    MUST_REACH,
    NO_VARIABLES,
    SEVERAL_LOSSES,
    SEVERAL_PASSES,
    SHARDED,
    SUBCLASSES,
    WATCHED,
    around,
)
from gradkit._checks.modified_tensors import functions_above_hidden, nodes_of_functions
from gradkit._compat import distributed
from gradkit._compat.dynamo import any_compiled, overwrites_saved_tensors
from gradkit._compat.nodes import any_released, has_released, names_by_kind, output_kind
from gradkit._core import graph
from gradkit._core.call import Call, Losses
from gradkit._core.graph import Subgraph
from gradkit._core.params import Params
from gradkit._core.user_code import asks_for_backward, name_of_function
from gradkit.errors import FreedGraphError, UnsupportedGraphError, message


def check_backward(call: Call, *, casts: bool) -> None:
    """Raise if `.backward()` for some params would leave `.grad` wrong, or as it was."""
    # `casts` asks for leaves that were cast, too, for which the whole graph is walked.
    check_call(call)
    if call.functions.users:
        _refuse_not_executed(call)
    if not casts:
        if not graph.leads_to_one_of(call.outputs, call.passes[0].params.variables):
            reachability.refuse_nothing_reached(call)
        return
    below = call.whole
    if not any(below.reaches(variable) for _, _, variable in call.variables()):
        reachability.refuse_nothing_reached(call)
    leaves = [(node, graph.leaf_of(node)) for node in graph.leaf_nodes(below.nodes)]
    kept = {id(x) for node, x in leaves if output_kind(node, 0) == (x.dtype, x.device)}
    if len(kept) < len(leaves):  # torch would leave the `.grad` of one that was cast as it was
        each = [[v if id(v) in kept else None for v in p.variables] for _, p in call.passes]
        reachability.refuse_cast_since_forward(call, each)


def _refuse_not_executed(call: Call) -> None:
    """Raise if `.backward()` for some params leaves out a Function that may write their `.grad`."""
    variables = [variable for _, _, variable in call.variables()]
    functions = functions_above_hidden(call, variables)
    if functions and not call.whole.leading_to(variables).issuperset(functions):
        got = "some that the backward of a Function may write the .grad of, which torch leaves out "
        got += "for these params"
        fix = "gradkit.backward_(losses), for all leaves; or gradkit.value_and_grads"
        raise UnsupportedGraphError(message("params", "leaves that a pass reaches", got, fix))


def check_backward_to_leaves(call: Call) -> None:
    """Raise if `.backward()` for all leaves would leave `.grad` wrong, or as it was."""
    for index in call.differentiated:
        if graph.is_freed(call.outputs[index]):
            raise FreedGraphError(freed_message(call.losses, [index]))
        if call.create_graph:
            below, where = call.graph.below([index]), partial(call.losses.path, index)
            leaves = list(below.leaves.values())
            reachability.refuse_unrecorded(leaves, where)
            higher_derivatives.refuse_wrong_derivative(where, leaves, below)
    if around(call) & (CREATES_GRAPH | WATCHED | CHECKPOINTS):
        _refuse_other_tensors(call)


def _refuse_incomplete(call: Call) -> None:
    """Raise for a node in whose presence gradients would be incomplete, or local."""
    below = call.graph.below
    if refusal_reasons(below(call.differentiated).kinds, call.allowed):
        for index in call.differentiated:
            refuse_nodes(below([index]).kinds, call.losses.path(index), call.allowed)


def _refuse_special_points(call: Call) -> None:
    """Raise where torch is wrong for values that a node has saved."""
    # A look at every node would double the time of a small call: the graph of a single pass is
    # looked at only where something else asks for it, or a Function makes the gradient of a leaf.
    if call.create_graph:
        return
    if around(call) & (INCOMPLETE | MUST_REACH | SEVERAL_PASSES | SEVERAL_LOSSES) or any(
        child is not None and graph.is_leaf_node(child)
        for node in nodes_of_functions(call)
        for child, _ in node.next_functions
    ):
        higher_derivatives.refuse_in_call(call)


def _refuse_checkpoints(call: Call) -> None:
    """Raise if a Function asks torch whether it runs under `.backward()`, as checkpoints do."""
    for kind in set(map(type, nodes_of_functions(call))):
        if asks_for_backward(kind):
            reason = only_backward(name_of_function(kind))
            raise UnsupportedGraphError(message(call.losses.first_paths(), *reason))


def _refuse_gathered(call: Call) -> None:
    for params in () if call.allowed else call.params:
        reachability.refuse_gathered(params)


def _refuse_other_tensors(call: Call) -> None:
    thorough = bool(around(call) & (CREATES_GRAPH | SEVERAL_PASSES | WATCHED))
    recomputations.refuse_other_tensors(call, thorough=thorough)


def refuse_freed(call: Call, *, thorough: bool | None = None) -> None:
    """Raise if a pass would execute a freed node: any such, or one next to a loss."""
    # A node freed deeper down shows when a single pass gets there; looking at every node would take
    # as long as a small pass.
    if thorough is None:
        thorough = len(call.passes) > 1
    if thorough and not any_released(call.whole.nodes, names_by_kind(call.whole.kinds)):
        return
    for group, params in call.passes:
        for index in group:
            is_doubtful = thorough or graph.is_freed(call.outputs[index])
            if is_doubtful and _executes_freed(call.graph.below([index]), params):
                raise FreedGraphError(freed_message(call.losses, [index]))


def refuse_donated(call: Call, kept: Sequence[bool]) -> None:
    """Raise if a pass is to keep a graph that a compiled backward pass would overwrite."""
    kinds = call.whole.kinds
    if not any_compiled(kinds) or not any(map(overwrites_saved_tensors, kinds)):
        return
    for keep, (group, params) in zip(kept, call.passes, strict=True):
        below = call.graph.below(group)
        # `.backward()` for all leaves is for no variables in particular.
        variables = params.variables or list(below.leaves.values())
        kinds = set(map(type, below.leading_to(variables)))
        elements = max(call.outputs[index].numel() for index in group)
        if (keep or elements > 1) and any(map(overwrites_saved_tensors, kinds)):
            raise UnsupportedGraphError(message(call.losses.path(group[0]), *DONATED))


DONATED = (
    "a graph that more than one pass can go through",
    "one compiled by torch.compile, whose backward pass overwrites what it has saved (donated "
    "buffers), as the first single pass through it has settled",
    "set torch._functorch.config.donated_buffer = False before the model is compiled; "
    "torch._dynamo.reset() forgets what is compiled already",
)


def _executes_freed(below: Subgraph, params: Params) -> bool:
    return any_released(below.leading_to(params.variables), names_by_kind(below.kinds))


def freed_message(losses: Losses, indices: Sequence[int]) -> str:
    """Return the message for a second pass through the graph of some losses."""
    got = "one that an earlier backward() or gradkit call has freed"
    fix = "ask for all gradients in one call: gradkit.per_loss_grads({'a': loss_a, 'b': loss_b}, "
    fix += "params), gradkit.minimize_([first, second], loss) or total.add_([loss_a, loss_b], n); "
    fix += "or let the earlier call be gradkit.value_and_grads(losses, params, retain_graph=True)"
    kept = "compute it anew in each step, or cut it off, kept.detach()"
    if any(graph.is_freed(losses.leaves[index]) for index in indices):
        fix += f". What was kept from an earlier step (a hidden state, a cache): {kept}"
    else:
        got += " in part: a value that was kept leads there, a hidden state or a cache"
        fix = f"{kept}; for losses of one step, {fix}"
    expected = "a graph that still holds its saved tensors"
    return message(", ".join(map(losses.path, indices)), expected, got, fix)


def losses_freed(losses: Losses) -> Sequence[int]:
    """Return the losses whose graphs hold a freed node; all of them if none is known to."""
    graphs = [Subgraph([leaf]).nodes for leaf in losses.leaves]
    freed = [index for index, nodes in enumerate(graphs) if any(map(has_released, nodes))]
    return freed or range(len(graphs))


def only_backward(name: str = "a Function") -> tuple[str, str, str]:
    """Return (expected, got, what to do) for a Function that runs under `.backward()` only."""
    got = f"{name}, whose backward runs under .backward() only: a reentrant checkpoint"
    fix = "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); or `with "
    fix += "gradkit.capture_grads(params) as captured:` around loss.backward(); or backward_(loss)"
    return "a graph without reentrant checkpoints", got, fix


# [F1, M4, M5]; the names are those of `user_code.REFUSED`.
_REASONS = {
    "CheckpointFunctionBackward": (
        "a graph without reentrant checkpoints",
        "one: autograd cannot see the parameters inside, and would leave out their gradient",
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    ),
    distributed.SINK: (
        "the forward pass of a plain module",
        "one of DistributedDataParallel (static_graph or find_unused_parameters), whose gradients "
        "would not be synchronized, and whose later backward() would stop reducing",
        "call gradkit.distributed.value_and_grads(losses, ddp), without static_graph; or run "
        "distributed.module(...) for the forward",
    ),
    distributed.POST_BACKWARD: (
        "the forward pass of a plain module",
        "one of a fully_shard module, whose sharded parameters are not in the graph",
        "call gradkit.distributed.value_and_grads(losses, module)",
    ),
}


def refuse_nodes(kinds: Iterable[type], where: str, allowed: Collection[str] = ()) -> None:
    """Raise if a graph holds a node that would make its gradients wrong, but for those allowed."""
    for reason in refusal_reasons(kinds, allowed):
        raise UnsupportedGraphError(message(where, *reason))


def refusal_reasons(
    kinds: Iterable[type], allowed: Collection[str] = ()
) -> list[tuple[str, str, str]]:
    """Return (expected, got, what to do) for each kind of node that is refused."""
    names = {kind.__name__ for kind in kinds} & _REASONS.keys()
    return [_REASONS[name] for name in sorted(names.difference(allowed))]


# The checks before the passes of a call, in this order: what there is around it, and by what.
_BEFORE: tuple[tuple[int, Callable[[Call], None]], ...] = (
    (NO_VARIABLES, reachability.refuse_no_variables),
    (HOOKS, reachability.refuse_hooked_leaf_losses),
    (SHARDED, _refuse_gathered),
    (CREATES_GRAPH, higher_derivatives.refuse_wrong_derivatives),
    (CONSTANT, higher_derivatives.refuse_inside_transforms),
    (FUNCTIONS, _refuse_checkpoints),
    (INCOMPLETE | MUST_REACH | SEVERAL_PASSES | FUNCTIONS, _refuse_special_points),
    (INCOMPLETE, _refuse_incomplete),
    (CHANGED | SUBCLASSES, reachability.refuse_unreached_views_and_subclasses),
    (COMPILED_VALUES, reachability.refuse_compiled_together),
    (MUST_REACH, reachability.refuse_unreached),
    (CREATES_GRAPH | SEVERAL_PASSES | WATCHED | CHECKPOINTS, _refuse_other_tensors),
    (SEVERAL_LOSSES, refuse_freed),
)
_ANY = reduce(or_, (when for when, _ in _BEFORE))


def check_call(call: Call) -> None:
    """Raise if a gradient of the call would be wrong, zero or local."""
    bits = around(call)
    if bits & _ANY:
        for when, check in _BEFORE:
            if bits & when:
                check(call)
