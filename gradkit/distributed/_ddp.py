"""Modules that DistributedDataParallel replicates: local gradients, then their means."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import attrgetter
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.passes import PassResult
from gradkit._checks import eager_graph
from gradkit._checks.reachability import refuse_cast_since_forward
from gradkit._compat import distributed
from gradkit._core import graph, pytree, user_code
from gradkit._core.call import Losses
from gradkit._core.leaf_arithmetic import add_leaves
from gradkit._core.ownership import empty_for
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit._state.grad_attribute import replace_grad
from gradkit.distributed._agreement import (
    NO_DIGEST,
    Description,
    GradSpec,
    Group,
    Specs,
    agree_or_raise,
    collective_errors,
    require_group,
)
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._reduction import (
    LocalGrads,
    ReductionPlan,
    agree_on_grads,
    keep_plan,
    plans,
    reduce_as_planned,
    reduce_grads,
)
from gradkit.errors import StructureError, UnsupportedGraphError, message

_Replicas: TypeAlias = Sequence[DistributedDataParallel]
# Leaf tensors, each with the gradient that is added to its `.grad`.
_Pairs: TypeAlias = list[tuple[Tensor, Tensor | None]]
_shape = attrgetter("shape")
# torch's own hooks that step an optimizer have one of these in their names.
_STEPPING = ("optim", "zero")


def run(call: DistributedCall, modules: _Replicas) -> tuple[PassResult, Params]:
    """Return the passes' result, reduced over the ranks, and the params."""
    group = require_one_group(modules, call.name)
    hooked = with_comm_hook(modules)
    ignoring = any(module.parameters_to_ignore for module in modules)
    # Communication hooks have their own buckets, and the key of a plan says nothing of ignored
    # parameters.
    plannable = not (hooked or ignoring or call.create_graph)
    losses, params, plan = _read_on_all_ranks(group, call, modules, hooked, plannable)
    results: list[PassResult] = []

    @cache
    def local_grads() -> LocalGrads:
        result = call.run(losses, params, allowed=(distributed.SINK,))
        results.append(result)
        grads = [grad for row in result.grads for grad in row]
        if type(None) in set(map(type, grads)):
            refuse_cast_since_forward(result.call, result.grads)
        _check_comm_hooks(hooked, grads)
        templates = params.variables * len(result.grads)
        path = partial(call.grad_path, losses, params)
        return LocalGrads(grads, templates, call.rank_invariants(losses, params), path)

    reduced = reduce_as_planned(group, plan, local_grads, 1 / group.size) if plan else None
    if reduced is None:
        local, specs = agree_on_grads(group, local_grads, differentiable=call.create_graph)
        reduced = _reduce(group, hooked, local, specs, in_place=plannable)
        if plannable:
            keep_plan(_plan_key(group, call, losses, params), group, local.grads, specs)
    if ignoring:
        # DDP leaves the gradients of parameters that it ignores local, as `.backward()` does.
        replicated = distributed.reduced_params(modules)
        local = local_grads()
        columns = zip(local.grads, local.templates, reduced, strict=True)
        reduced = [mean if id(param) in replicated else mine for mine, param, mean in columns]
    width = len(params.variables)
    rows = [reduced[start : start + width] for start in range(0, len(reduced), width)]
    return replace(results[0], grads=rows), params


def _read_on_all_ranks(
    group: Group, call: DistributedCall, modules: _Replicas, hooked: _Replicas, plannable: bool
) -> tuple[Losses, Params, ReductionPlan | None]:
    """Return the losses and params, checked before any rank runs a pass, and a plan of all."""

    def read() -> tuple[tuple[Losses, Params, ReductionPlan | None], Description]:
        losses, params = read_replicated(call, modules)
        several = not call.joint and sum(loss.numel() for loss in losses.leaves) > 1
        _check_comm_hooks(hooked, create_graph=call.create_graph, several=several)
        plan = plans.get(_plan_key(group, call, losses, params)) if plannable else None
        expected = NO_DIGEST if plan is None else plan.digest
        return (losses, params, plan), call.describe(losses, params, expected)

    (losses, params, plan), agreement = agree_or_raise(group, read)
    return losses, params, plan if agreement.same_expected else None


def read_replicated(call: DistributedCall, modules: _Replicas) -> tuple[Losses, Params]:
    """Return the losses and params of a call, checked on this rank."""
    losses, params = call.read()
    _refuse_unreplicated(params, call.module, modules)
    refuse_static_graph(losses)
    return losses, params


def _plan_key(group: Group, call: DistributedCall, losses: Losses, params: Params) -> Hashable:
    """Return what is equal for two calls whose gradients can share a plan."""
    shapes = tuple(map(_shape, params.variables))
    return id(group.handle), call.rank_invariants(losses, params), shapes


def _refuse_unreplicated(params: Params, tree: PyTree, modules: _Replicas) -> None:
    if all(isinstance(leaf, DistributedDataParallel) for leaf in pytree.flatten(tree)[0]):
        return
    replicated = {id(param) for module in modules for param in module.parameters()}
    for index, variable in enumerate(params.variables):
        if id(variable) not in replicated:
            expected = "a parameter that DistributedDataParallel reduces"
            got = "one outside of it, whose gradient would not be synchronized"
            fix = "wrap the whole module, or use gradkit.distributed.all_reduce"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))


def refuse_static_graph(losses: Losses) -> None:
    """Raise if a pass would end the reduction of another module, with static_graph [M4]."""
    if not user_code.functions_alive().refused:  # no node of DDP's is alive
        return
    for index, loss in enumerate(losses.leaves):
        for node in graph.nodes_below([loss]) if loss.requires_grad else ():
            if type(node).__name__ == distributed.SINK and distributed.sink_is_static(node):
                eager_graph.refuse_nodes({type(node)}, losses.path(index))


def add_to_replicas(params: PyTree, read_pairs: Callable[[], _Pairs]) -> _Pairs:
    """Add to `.grad` of replicated modules in `params`, reduced; return the other pairs."""
    leaves, _ = pytree.flatten(params)
    roots = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    parts = {id(part): part for root in roots for part in root.modules()}.values()
    modules = [part for part in parts if isinstance(part, DistributedDataParallel)]
    if distributed.PROCESS_GROUPS and not modules:
        modules = distributed.replicas_of(read_params(params, allow_distributed=True).variables)
    if not modules:
        return read_pairs()
    # DDP's reducers are not used: they reduce once after each forward pass, and otherwise silently
    # leave the gradients local [M2].
    if not all(module.require_backward_grad_sync for module in modules):
        expected = "a DistributedDataParallel module that reduces"
        got = "one inside of no_sync(), whose gradients would not be synchronized"
        fix = "make the call outside of it, or without hooks=True"
        raise UnsupportedGraphError(message("params", expected, got, fix))
    group = require_one_group(modules, "gradkit.add_grads_")
    hooked = with_comm_hook(modules)
    replicated = distributed.reduced_params(modules)
    ours: _Pairs = []
    others: _Pairs = []

    def totals() -> LocalGrads:
        for pair in read_pairs():
            (ours if id(pair[0]) in replicated else others).append(pair)
        leaves, grads = [leaf for leaf, _ in ours], [grad for _, grad in ours]
        _check_comm_hooks(hooked, [*grads, *(leaf.grad for leaf in leaves)])
        sums = [None if grad is None else add_leaves(leaf.grad, grad) for leaf, grad in ours]
        names = [replicated[id(leaf)] for leaf in leaves]
        invariants = (("the call", "add_grads_"), ("the parameters", tuple(names)))
        return LocalGrads(sums, leaves, invariants, lambda index: f"grads of {names[index]}")

    local, specs = agree_on_grads(group, totals)
    # A rank without a gradient adds its `.grad`; where no rank has one, `.grad` stays.
    pairs = zip(ours, local.grads, strict=True)
    sums = [leaf.grad if total is None else total for (leaf, _), total in pairs]
    reduced = _reduce(group, hooked, replace(local, grads=sums), specs)
    for (leaf, _), mean in zip(ours, reduced, strict=True):
        if mean is not None:
            replace_grad(leaf, mean)
    return others


def require_one_group(modules: _Replicas, call: str) -> Group:
    """Return the one group over which modules are replicated."""
    for module in modules:
        _check_reducible(module)
    handle = modules[0].process_group
    if any(module.process_group is not handle for module in modules):
        expected, fix = "modules of one process group", "make a call for each group"
        raise StructureError(message(call, expected, "several", fix))
    return require_group(handle, call)


def _check_reducible(module: DistributedDataParallel) -> None:
    """Raise if gradients cannot be reduced outside of the module's own backward passes [M4]."""
    wrapped = "a DistributedDataParallel module"
    if module.static_graph:
        expected, got = f"{wrapped} without static_graph", "one with static_graph=True"
        fix = "leave static_graph out: with it, a functional pass ends all later reduction"
    elif distributed.is_joining(module):
        expected, got = f"{wrapped} outside of join()", "one inside of it"
        fix = "give all ranks as many inputs: a rank that has joined takes no part in this call"
    elif module.mixed_precision is not None:
        expected, got = f"{wrapped} without mixed_precision", "one with it"
        fix = "use torch.autocast in the forward pass"
    elif distributed.delays_all_reduce(module):
        expected, got = wrapped, "one with delay_all_reduce_named_params"
        fix = "leave it out: a hook reduces these parameters, also in a functional pass"
    else:
        return
    raise UnsupportedGraphError(message("the module", expected, got, fix))


def with_comm_hook(modules: _Replicas) -> list[DistributedDataParallel]:
    return [module for module in modules if distributed.has_comm_hook(module)]


def _reduce(
    group: Group, hooked: _Replicas, local: LocalGrads, specs: Specs, *, in_place: bool = False
) -> list[Tensor | None]:
    """Return the means over the ranks, by the communication hooks of modules that have one."""
    # The reducer's buckets have the parameters that were trained when the module was wrapped.
    buckets = map(distributed.zero_buckets, hooked)
    bucketed = [{id(param) for bucket in each for param in bucket.parameters()} for each in buckets]
    without_hook = specs
    if hooked:
        by_hook, pairs = set().union(*bucketed), zip(local.templates, specs, strict=True)
        without_hook = tuple(None if id(param) in by_hook else spec for param, spec in pairs)
    reduced = reduce_grads(group, local, without_hook, 1 / group.size, in_place=in_place)
    for module, keys in zip(hooked, bucketed, strict=True):
        for index, grad in _reduce_by_hook(group, module, keys, local, specs):
            reduced[index] = grad
    return reduced


def _check_comm_hooks(
    hooked: _Replicas,
    grads: Iterable[Tensor | None] = (),
    *,
    create_graph: bool = False,
    several: bool = False,
) -> None:
    """Raise if modules' hooks cannot reduce these gradients; `several`: of several losses."""
    hooks = [hook for module in hooked for hook in distributed.comm_hooks(module)]
    if not hooked:
        return
    if create_graph:
        got = "create_graph=True"
    elif any(grad is not None and grad.layout != torch.strided for grad in grads):
        got = "a sparse gradient"
    elif any(word in hook.__qualname__ for hook, _ in hooks for word in _STEPPING):
        got = "a hook that steps an optimizer"
    elif several and any(hasattr(state, "error_dict") for _, state in hooks):
        got = "several losses: the hook would add the error of one loss to the next"
    else:
        return
    expected = "dense gradients without a graph, one a parameter, for a communication hook"
    fix = "leave out the hook, or reduce with gradkit.distributed.all_reduce"
    raise UnsupportedGraphError(message("the module", expected, got, fix))


def _reduce_by_hook(
    group: Group,
    module: DistributedDataParallel,
    bucketed: set[int],
    local: LocalGrads,
    specs: Specs,
) -> Iterator[tuple[int, Tensor]]:
    """Yield index and mean of each gradient that a module's hook reduces, loss by loss."""
    width = len(set(map(id, local.templates))) or 1
    for start in range(0, len(specs), width):
        indices = range(start, start + width)
        row = [i for i in indices if id(local.templates[i]) in bucketed and specs[i] is not None]
        if row:
            yield from zip(row, _reduce_row(group, module, row, local, specs), strict=True)


def _reduce_row(
    group: Group,
    module: DistributedDataParallel,
    row: Sequence[int],
    local: LocalGrads,
    specs: Specs,
) -> list[Tensor]:
    """Return the means of the gradients of one loss; `row` has their indices."""
    params = [cast("Tensor", local.templates[index]) for index in row]
    kinds = [cast("GradSpec", specs[index]) for index in row]
    loss_shape = kinds[0].shape[: len(kinds[0].shape) - params[0].dim()]
    pairs = zip(params, kinds, strict=True)
    means = [empty_for(param, kind.dtype, loss_shape) for param, kind in pairs]
    # A hook takes one gradient for each parameter: that of one element of the loss.
    for element in range(torch.Size(loss_shape).numel()):
        grads = {
            id(param): grad.view(-1, *param.shape)[element]
            for index, param in zip(row, params, strict=True)
            if (grad := local.grads[index]) is not None
        }
        reduced = _run_hook(group, module, grads)
        for param, mean in zip(params, means, strict=True):
            mean.view(-1, *param.shape)[element].copy_(reduced[id(param)])
    return means


def _run_hook(
    group: Group, module: DistributedDataParallel, grads: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return the means of gradients by parameter id; one that is not there counts as zero."""
    reduced: dict[int, Tensor] = {}
    with torch.no_grad(), collective_errors(group, backend_only=True):
        for bucket in distributed.zero_buckets(module):
            views = dict(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
            for key in views.keys() & grads.keys():
                _fill(views[key], grads[key])
            bucket.buffer().copy_(distributed.run_comm_hook(module, bucket))
            reduced |= views
    return reduced


def _fill(view: Tensor, grad: Tensor) -> None:
    if grad.dtype != view.dtype:
        expected = f"gradients in {view.dtype}, as when it was wrapped, for its communication hook"
        fix = "call .to(), .double(), ... before DistributedDataParallel(module)"
        raise UnsupportedGraphError(message("the module", expected, str(grad.dtype), fix))
    view.copy_(grad)
