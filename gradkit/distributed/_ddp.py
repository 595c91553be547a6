"""The passes for DistributedDataParallel: this rank's gradients, and then their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gradkit._autograd.passes import PassResult
from gradkit._checks import unsupported
from gradkit._checks.call import refuse_stale
from gradkit._core import graph, pytree
from gradkit._core.inputs import Losses, Params, read_params, require_graph
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import agree_or_raise, agreed_leaves
from gradkit.distributed._call import DistributedCall
from gradkit.distributed._reduction import LocalGrads
from gradkit.distributed._replicas import (
    join_replicas,
    reduce_replicas,
    reduced_params,
    refuse_beyond_hooks,
)
from gradkit.errors import UnsupportedGraphError, message

_SINK = "_DDPSinkBackward"


def run(
    work: DistributedCall, modules: Sequence[DistributedDataParallel]
) -> tuple[PassResult, Params]:
    """Run the passes, and reduce what they bring.

    Args:
        work: The call.
        modules: The replicated modules.

    Returns:
        What the passes brought, reduced over the ranks; and the params.
    """
    group = join_replicas(modules, work.call)
    given: list[tuple[Losses, Params]] = []
    made: list[tuple[PassResult, Params]] = []

    def read() -> tuple[object, ...]:
        target, wanted = work.target(), read_params(work.module, wrapped=True)
        work.check(target)
        require_graph(target, target.leaves)
        if not _are_wrapped_whole(work.module, modules):
            _refuse_strangers(wanted, modules)
        _refuse_static(target)
        several = not work.scalar and sum(loss.numel() for loss in target.leaves) > 1
        refuse_beyond_hooks(modules, (), graph=work.create_graph, several=several)
        given.append((target, wanted))
        return work.structure(target, wanted), ()

    def paths() -> tuple[str, ...]:
        target, wanted = given[0]
        losses = [] if work.scalar else list(map(target.path, range(len(target.leaves))))
        return (*losses, *map(wanted.path, range(len(wanted.variables))))

    theirs = agree_or_raise(group, read, paths)  # before anything has run
    if theirs is not None:
        agreed_leaves(group, theirs, str)
    target, wanted = given[0]

    def offer() -> LocalGrads:
        found = work.run(target, wanted, allowed=(_SINK,))
        refuse_stale(found.grads, target, found.plan)
        made.append((found, wanted))
        grads = [grad for row in found.grads for grad in row]
        refuse_beyond_hooks(modules, grads)
        return LocalGrads(
            grads,
            wanted.variables * len(found.grads),
            work.structure(target, wanted),
            lambda index: _path(found, wanted, index),
        )

    reduced = reduce_replicas(group, modules, offer, differentiable=work.create_graph)
    found, _ = made[0]
    width = len(wanted.variables)
    rows = [reduced[start : start + width] for start in range(0, len(reduced), width)]
    ignored = _ignored(modules)
    for row, before in zip(rows, found.grads, strict=True):
        for index, variable in enumerate(wanted.variables):
            if id(variable) in ignored:
                row[index] = before[index]  # this rank's, as `.backward()` leaves it
    return replace(found, grads=rows), wanted


def _path(found: PassResult, wanted: Params, index: int) -> str:
    row, column = divmod(index, len(wanted.variables))
    group, _ = found.plan[row]
    of = found.target.path(group[0]) if len(found.plan) > 1 else "losses"
    return f"the gradient of {of} by {wanted.path(column)}"


def _ignored(modules: Sequence[DistributedDataParallel]) -> set[int]:
    if not any(module.parameters_to_ignore for module in modules):
        return set()
    reduced = {id(param) for module in modules for param in reduced_params(module)}
    every = {id(param) for module in modules for param in module.parameters()}
    return every - reduced


def _are_wrapped_whole(tree: PyTree, modules: Sequence[DistributedDataParallel]) -> bool:
    leaves, _ = pytree.flatten(tree)
    return {id(leaf) for leaf in leaves} <= {id(module) for module in modules}


def _refuse_strangers(wanted: Params, modules: Sequence[DistributedDataParallel]) -> None:
    known = {id(param) for module in modules for param in module.parameters()}
    for index, variable in enumerate(wanted.variables):
        if id(variable) not in known:
            raise UnsupportedGraphError(
                message(
                    wanted.path(index),
                    "a parameter that DistributedDataParallel reduces",
                    "one outside of it, whose gradient would be this process's alone",
                    "wrap the whole module, or use gradkit.distributed.all_reduce",
                )
            )


def _refuse_static(target: Losses) -> None:
    """Raise if a pass would end the reduction of another module, with static_graph [M4]."""
    for index, loss in enumerate(target.leaves):
        for node in graph.nodes_below([loss]) if loss.requires_grad else ():
            sink: Any = node
            if type(node).__name__ == _SINK and sink.ddp_weakref().static_graph:
                unsupported.refuse_hazards({type(node)}, target.path(index))
