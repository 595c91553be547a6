"""The passes for DistributedDataParallel: local gradients, then their mean over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.passes import PassResult
from gradkit._checks import unsupported
from gradkit._checks.reachability import refuse_stale
from gradkit._compat import ddp
from gradkit._core import graph, pytree
from gradkit._core.losses import Losses, require_graph
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import agree_or_raise, common_specs
from gradkit.distributed._comm_hooks import check_comm_hooks
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._group import Group
from gradkit.distributed._reduction import LocalGrads, agree_on_grads
from gradkit.distributed._replicas import join_replicas, reduce_replicas, reduced_params
from gradkit.errors import UnsupportedGraphError, message

_Replicas = Sequence[DistributedDataParallel]


def run(call: DistributedCall, modules: _Replicas) -> tuple[PassResult, Params]:
    """Return the passes' result, reduced over the ranks, and the params."""
    group = join_replicas(modules, call.name)
    losses, params = _read_on_all_ranks(group, call, modules)
    results: list[PassResult] = []

    def local_grads() -> LocalGrads:
        result = call.run(losses, params, allowed=(ddp.SINK,))
        results.append(result)
        refuse_stale(result.call, result.grads)
        grads = [grad for row in result.grads for grad in row]
        check_comm_hooks(modules, grads)
        likes = params.variables * len(result.grads)
        path = partial(call.grad_path, losses, params)
        return LocalGrads(grads, likes, call.structure(losses, params), path)

    local, specs = agree_on_grads(group, local_grads, differentiable=call.create_graph)
    reduced = reduce_replicas(group, modules, local, specs)
    ignored = _ignored_params(modules)
    # DDP leaves the gradients of parameters that it ignores local, as `.backward()` does.
    grads = [
        mine if id(param) in ignored else mean
        for mine, param, mean in zip(local.grads, local.likes, reduced, strict=True)
    ]
    width = len(params.variables)
    rows = [grads[start : start + width] for start in range(0, len(grads), width)]
    return replace(results[0], grads=rows), params


def _read_on_all_ranks(
    group: Group, call: DistributedCall, modules: _Replicas
) -> tuple[Losses, Params]:
    """Return the losses and params, checked before any rank runs a pass."""

    def read() -> tuple[tuple[Losses, Params], tuple[object, ...]]:
        losses, params = call.read_losses(), read_params(call.module, allow_distributed=True)
        require_graph(losses, losses.leaves)
        if not _are_replicas(call.module, modules):
            _refuse_unreplicated(params, modules)
        _refuse_static_graph(losses)
        several = not call.joint and sum(loss.numel() for loss in losses.leaves) > 1
        check_comm_hooks(modules, create_graph=call.create_graph, several=several)
        return (losses, params), (call.structure(losses, params), ())

    def paths(inputs: tuple[Losses, Params]) -> tuple[str, ...]:
        losses, params = inputs
        of_losses = [] if call.joint else list(map(losses.path, range(len(losses.leaves))))
        return (*of_losses, *map(params.path, range(len(params.variables))))

    inputs, descriptions = agree_or_raise(group, read, paths)
    if descriptions is not None:
        common_specs(group, descriptions, str)
    return inputs


def _ignored_params(modules: _Replicas) -> set[int]:
    if not any(module.parameters_to_ignore for module in modules):
        return set()
    reduced = {id(param) for module in modules for param in reduced_params(module)}
    return {id(param) for module in modules for param in module.parameters()} - reduced


def _are_replicas(tree: PyTree, modules: _Replicas) -> bool:
    leaves, _ = pytree.flatten(tree)
    return {id(leaf) for leaf in leaves} <= {id(module) for module in modules}


def _refuse_unreplicated(params: Params, modules: _Replicas) -> None:
    replicated = {id(param) for module in modules for param in module.parameters()}
    for index, variable in enumerate(params.variables):
        if id(variable) not in replicated:
            expected = "a parameter that DistributedDataParallel reduces"
            got = "one outside of it, whose gradient would not be synchronized"
            fix = "wrap the whole module, or use gradkit.distributed.all_reduce"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))


def _refuse_static_graph(losses: Losses) -> None:
    """Raise if a pass would end the reduction of another module, with static_graph [M4]."""
    for index, loss in enumerate(losses.leaves):
        for node in graph.nodes_below([loss]) if loss.requires_grad else ():
            if type(node).__name__ == ddp.SINK and ddp.sink_is_static(node):
                unsupported.refuse_nodes({type(node)}, losses.path(index))
