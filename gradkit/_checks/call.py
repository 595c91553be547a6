"""What a call refuses: all that would come out wrong, zero or local, before anything has run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._autograd.engine import Run
from gradkit._checks import unsupported
from gradkit._core import graph, hooks, saved_tensors
from gradkit._core.inputs import Losses, Params
from gradkit._core.ownership import PLAIN_TYPES
from gradkit.errors import (
    FreedGraphError,
    UnreachedParamError,
    UnsupportedGraphError,
    describe,
    message,
)

Grads: TypeAlias = list[Tensor | None]
# What the passes of a call are: for each, the losses that it starts from and the params it is for.
Plan: TypeAlias = Sequence[tuple[Sequence[int], Params]]


def prepare(
    losses: Losses,
    outputs: Sequence[Tensor],
    plan: Plan,
    create_graph: bool,
    unused: str,
    allowed: Collection[str] = (),
) -> Run:
    """Refuse what would come out wrong, zero or local, before anything has run.

    Args:
        losses: The losses, for errors.
        outputs: The tensors that are differentiated, one for each loss.
        plan: The passes.
        create_graph: The caller's option.
        unused: The caller's option.
        allowed: Nodes that are refused otherwise, as the caller sees to them.

    Returns:
        How to run the passes.

    Raises:
        FreedGraphError: A loss has been differentiated before.
        UnreachedParamError: A param cannot be reached.
        UnsupportedGraphError: The graph cannot be differentiated rightly.
    """
    if not any(params.variables for _, params in plan):
        raise UnreachedParamError(unreached(losses, plan, None))
    if not allowed:
        for params in {id(params): params for _, params in plan}.values():
            refuse_gathered(params)
    if create_graph:
        _refuse_wrong_derivatives(losses, outputs, plan)
    else:
        _refuse_inside_transforms(losses, outputs)
    ordinary = all(params.ordinary for _, params in {id(p): (g, p) for g, p in plan}.values())
    live = [index for group, _ in plan for index in group]
    guard = hooks.hooks_registered()
    if not ordinary or unsupported.custom_functions_alive():
        kinds: set[type] = set()
        for index in live:
            below = set(map(type, graph.nodes_below([outputs[index]])))
            unsupported.refuse_hazards(below, losses.path(index), allowed)
            kinds |= below
        guard = guard or bool(unsupported.user_functions(kinds))
    if not ordinary:
        _refuse_doubtful([outputs[index] for index in live], plan)
    if unused == "error":
        refuse_unreached(losses, outputs, plan)
    run = Run(losses.leaves, losses.path, create_graph=create_graph, guard=guard, ordinary=ordinary)
    if len(live) > 1:
        # Before the pass for one loss frees the graph of another. A lone one the engine refuses.
        refuse_freed(run, outputs, plan, thorough=len(plan) > 1)
    return run


def refuse_gathered(params: Params) -> None:
    """Raise if params are those of a `fully_shard` module between its forward and backward passes.

    Args:
        params: The params.

    Raises:
        UnsupportedGraphError: So they are.
    """
    gathered = unsupported.gathered_params()
    for index, variable in enumerate(params.variables if gathered else ()):
        if id(variable) in gathered:
            raise UnsupportedGraphError(
                message(
                    params.path(index),
                    "a parameter of this process, or a shard of one",
                    "one that fully_shard has gathered for the backward pass: its gradient would "
                    "not be reduced, and its .grad is that of no shard",
                    "gradkit.distributed.value_and_grads(losses, module); or make the call before "
                    "the forward pass, or after the backward pass",
                )
            )


def _refuse_wrong_derivatives(losses: Losses, outputs: Sequence[Tensor], plan: Plan) -> None:
    for group, params in plan:
        for index in group:
            nodes = graph.nodes_below([outputs[index]])
            unsupported.refuse_wrong_derivative(losses.path(index), params.variables, nodes)


def _refuse_inside_transforms(losses: Losses, outputs: Sequence[Tensor]) -> None:
    for index, output in enumerate(outputs):
        if torch._C._functorch.is_gradtrackingtensor(output):
            raise UnsupportedGraphError(
                message(
                    losses.path(index),
                    "a loss outside of torch.func's grad, vjp and jvp",
                    "one inside: the transform would take the gradient for a constant",
                    "pass create_graph=True, so that it is differentiated, too",
                )
            )


def prepare_backward(
    losses: Losses,
    outputs: Sequence[Tensor],
    live: Sequence[int],
    params: Params | None,
    create_graph: bool,
) -> Run:
    """Refuse what would leave `.grad` wrong, or as it was, before anything has run.

    Args:
        losses: The losses, for errors.
        outputs: The tensors that are differentiated, one for each loss.
        live: Which of them carry a graph.
        params: The tensors whose `.grad` is written; None is all leaves.
        create_graph: The caller's option.

    Returns:
        How to run the pass.

    Raises:
        FreedGraphError: A loss has been differentiated before.
        UnreachedParamError: Nothing of the params is reached.
        UnsupportedGraphError: The graph cannot be differentiated rightly for these params.
    """
    if params is None:
        run = Run(losses.leaves, losses.path, create_graph=create_graph)
        for index in live:
            if saved_tensors.is_freed(outputs[index]):
                raise FreedGraphError(run.freed([index]))
            if create_graph:
                nodes = graph.nodes_below([outputs[index]])
                reached = graph.leaf_tensors(nodes).values()
                unsupported.refuse_wrong_derivative(losses.path(index), reached, nodes)
        return run
    run = prepare(losses, outputs, [(live, params)], create_graph, "none")
    roots = [outputs[index] for index in live]
    nodes = graph.nodes_below(roots)
    leaves = graph.leaves_of(nodes)
    if not any(graph.reached(v, roots, nodes, leaves) for v in params.variables):
        raise UnreachedParamError(unreached(losses, [(live, params)], 0))
    return run


def refuse_freed(run: Run, outputs: Sequence[Tensor], plan: Plan, *, thorough: bool) -> None:
    """Raise if a pass would meet a node that has been freed.

    Args:
        run: Names the losses.
        outputs: The tensors that are differentiated, one for each loss.
        plan: The passes.
        thorough: Look at every node on the way, not only at those next to the losses.

    Raises:
        FreedGraphError: So it is.
    """
    if thorough and not _any_freed(outputs, plan):
        return
    for group, params in plan:
        for index in group:
            # In one pass, what is freed deeper down shows only when the engine gets there: looking
            # at every node would take as long as a small pass.
            root = outputs[index]
            if (thorough or saved_tensors.is_freed(root)) and _would_meet_freed([root], params):
                raise FreedGraphError(run.freed([index]))


def _any_freed(outputs: Sequence[Tensor], plan: Plan) -> bool:
    """Return whether a pass would meet a freed node; once for all passes that want the same."""
    roots: dict[int, tuple[Params, list[Tensor]]] = {}
    for group, params in plan:
        roots.setdefault(id(params), (params, []))[1].extend(outputs[index] for index in group)
    return any(_would_meet_freed(starts, params) for params, starts in roots.values())


def _would_meet_freed(roots: Sequence[Tensor], params: Params) -> bool:
    nodes = graph.nodes_below(roots)
    return any(map(saved_tensors.has_released, graph.leading_to(params.variables, nodes)))


def _refuse_doubtful(roots: list[Tensor], plan: Plan) -> None:
    nodes = graph.nodes_below(roots)
    leaves = graph.leaves_of(nodes)

    def reached(tensor: Tensor) -> bool:
        return tensor.requires_grad and graph.reached(tensor, roots, nodes, leaves)

    listed = {id(variable) for _, params in plan for variable in params.variables}
    for _, params in plan:
        for index, variable in enumerate(params.variables):
            base = variable._base
            if reached(variable):
                continue
            # A slice of a parameter is a new variable each time it is taken [C3]; a view gets
            # another history when its base changes in place, as_strided [L2]. Beside its base it
            # may be None: the gradient stands there. So may any other view of an intermediate
            # value, whose losses may be others.
            apart = (
                base is not None
                and (base.is_leaf or graph.has_another_history(variable))
                and id(base) not in listed
                and variable.grad_fn not in nodes
                and reached(base)
            )
            if apart or graph.was_used_before_change(variable, nodes):
                came = "a view of one, made apart from it" if apart else "a later value of one"
                raise UnreachedParamError(
                    message(
                        params.path(index),
                        "a tensor that the losses were computed from",
                        f"{came}, or changed in place since: no gradient can arrive there",
                        "pass the tensor itself and index its gradient; change a copy, h + 1, and "
                        "not h itself",
                    )
                )
            if type(variable) not in PLAIN_TYPES and unsupported.may_be_sharded(variable):
                raise UnsupportedGraphError(
                    message(
                        params.path(index),
                        "a parameter that the losses reach",
                        "a DTensor that they do not: the parameters of a fully_shard module are "
                        "not in the graph",
                        "call gradkit.distributed.value_and_grads(losses, module)",
                    )
                )


def refuse_unreached(losses: Losses, outputs: Sequence[Tensor], plan: Plan) -> None:
    """Raise if a pass cannot reach every variable that it is for; for `unused="error"`.

    Args:
        losses: The losses, for the error.
        outputs: The tensors that are differentiated, one for each loss.
        plan: The passes.

    Raises:
        UnreachedParamError: A variable is not in the graph.
    """
    for group, params in plan:
        roots = [outputs[index] for index in group if outputs[index].requires_grad]
        nodes = graph.nodes_below(roots)
        leaves = graph.leaves_of(nodes)
        for index, variable in enumerate(params.variables):
            if not graph.reached(variable, roots, nodes, leaves):
                raise UnreachedParamError(unreached(losses, [(group, params)], index))


def require_reached(found: Sequence[Grads], losses: Losses, plan: Plan, unused: str) -> None:
    """Raise if the passes brought nothing at all, or not everything under `unused="error"`.

    Args:
        found: What each pass brought.
        losses: The losses, for the error.
        plan: The passes.
        unused: The caller's option.

    Raises:
        UnreachedParamError: So it is.
    """
    if unused == "error":
        for grads, (group, params) in zip(found, plan, strict=True):
            missing = [index for index, grad in enumerate(grads) if grad is None]
            if missing:  # in the graph, but a custom Function has returned None
                raise UnreachedParamError(unreached(losses, [(group, params)], missing[0]))
    if type(None) not in set(map(type, chain.from_iterable(found))):
        return
    refuse_stale(found, losses, plan)
    if all(grad is None for grads in found for grad in grads):
        raise UnreachedParamError(unreached(losses, plan, 0))


def refuse_stale(found: Sequence[Grads], losses: Losses, plan: Plan) -> None:
    """Raise if a leaf has no gradient since it was moved or cast after the losses were computed.

    Its `.data` of another type has another place for gradients to arrive, apart from the graph,
    which torch.autograd.grad reports as unused; `.backward()` fills the `.grad` of the old type.

    Args:
        found: What each pass brought.
        losses: The losses.
        plan: The passes.

    Raises:
        UnreachedParamError: So it is.
    """
    missing: dict[int, tuple[Params, int]] = {}
    arrived: set[int] = set()
    for grads, (_, params) in zip(found, plan, strict=True):
        for index, (variable, grad) in enumerate(zip(params.variables, grads, strict=True)):
            if grad is not None:
                arrived.add(id(variable))
            elif variable.grad_fn is None:
                missing.setdefault(id(variable), (params, index))
    if missing.keys() <= arrived:
        return
    live = {index for group, _ in plan for index in group}
    nodes = graph.nodes_below([losses.leaves[i] for i in live if losses.leaves[i].requires_grad])
    leaves = graph.leaves_of(nodes)
    for params, index in (missing[key] for key in missing.keys() - arrived):
        variable = params.variables[index]
        if id(variable) in leaves and graph.edge(variable).node not in nodes:
            raise UnreachedParamError(
                message(
                    params.path(index),
                    "the parameter as it was when the losses were computed",
                    f"{describe(variable)}, moved or cast since",
                    "call .to(), .double(), ... on the model before the forward pass",
                )
            )


def unreached(losses: Losses, plan: Plan, variable: int | None) -> str:
    """Return the message for a variable that losses do not reach, with what is known of the reason.

    Args:
        losses: The losses.
        plan: The passes that should have reached it.
        variable: Which variable of the first pass that has one; None if nothing requires grad.

    Returns:
        The text of an `UnreachedParamError`.
    """
    names = ", ".join(losses.path(index) for group, _ in plan for index in group[:3])
    if variable is None:
        where = " and ".join(dict.fromkeys(params.root for _, params in plan))
        got = "none: no tensor there requires grad"
        do = (
            "call requires_grad_() on the parameters before the forward pass; state_dict() and "
            ".data are detached, so pass the module"
        )
    elif not any(losses.leaves[index].requires_grad for group, _ in plan for index in group):
        where = next(params.path(variable) for _, params in plan if params.variables)
        got, do = "none: the loss is a constant", "leave it out, or allow it: unused='none'"
    else:
        where = next(params.path(variable) for _, params in plan if params.variables)
        got = (
            "none: the loss was not computed from it, or the path is cut (detach(), .data, "
            ".item(), no_grad, another copy of the model, an in-place change after its use, a "
            "custom Function that returns None)"
        )
        do = "compute the losses from these very tensors, or leave them out of params"
    return message(where, f"a path from {names}", got, do)
