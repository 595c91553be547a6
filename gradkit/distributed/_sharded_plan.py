"""What a call runs on `fully_shard` modules, read and checked before any rank runs a pass.

The graph holds the unsharded parameters; FSDP's backward hooks reduce-scatter their gradients into
the `.grad` of the shards [M5, M6].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradkit._checks.freed import refuse_freed
from gradkit._checks.reachability import refuse_nothing_reached
from gradkit._compat import fsdp
from gradkit._core.call import Call, Pass
from gradkit._core.graph import GraphView
from gradkit._core.losses import Losses, require_graph
from gradkit._core.params import Params, read_params
from gradkit.distributed._agreement import common_specs, raise_difference
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._grad_spec import GradSpec
from gradkit.distributed._group import Group
from gradkit.errors import UnsupportedGraphError, message


@dataclass(frozen=True, slots=True)
class ShardedPlan:
    """The passes of a call on this rank."""

    call: DistributedCall
    losses: Losses
    params: Params  # whose variables are the sharded parameters
    unsharded: Params  # whose variables are the unsharded parameters in the graph
    shards: list[Tensor]  # the sharded parameters of those, whose `.grad` a pass writes
    columns: list[int | None]  # of `params` in `unsharded`; None if no loss reaches the parameter
    reached: list[list[bool]]  # by loss (one row in a joint pass) and variable of `params`

    def description(self) -> tuple[object, ...]:
        """Return what must be the same on all ranks."""
        specs = [
            GradSpec.of(param) if is_reached else None
            for row in self.reached
            for param, is_reached in zip(self.params.variables, row, strict=True)
        ]
        return self.call.structure(self.losses, self.params), tuple(specs)

    def path(self, index: int) -> str:
        """Return the path of a gradient."""
        return self.call.grad_path(self.losses, self.params, index)

    def paths(self) -> tuple[str, ...]:
        """Return the paths of all gradients."""
        return tuple(map(self.path, range(len(self.reached) * len(self.columns))))


def make_plan(call: DistributedCall, groups: Sequence[Any]) -> ShardedPlan:
    """Return the plan of a call, checked on this rank."""
    _refuse_unsynchronized(groups)
    managed = {id(p): s for s in fsdp.shards_of(groups) for p in fsdp.module_params(s)}
    losses, given = call.read_losses(), read_params(call.module, allow_distributed=True)
    _check_params(given, managed, create_graph=call.create_graph)
    shards = [managed[id(variable)] for variable in given.variables]
    # A module shows the sharded or the unsharded parameter; the graph holds the unsharded one.
    in_graph = [id(_in_graph(s)) for s in shards]
    require_graph(losses, losses.leaves)
    view = GraphView(losses.leaves)
    every = range(len(losses.leaves))
    leaves = view.below(every).leaves
    unsharded = [leaves[key] for key in in_graph if key in leaves]
    columns = {id(leaf): index for index, leaf in enumerate(unsharded)}
    groups_of_losses = [every] if call.joint else [[index] for index in every]
    below = [view.below(group).leaves for group in groups_of_losses]
    plan = ShardedPlan(
        call,
        losses,
        replace(given, variables=[shard.sharded_param for shard in shards]),
        replace(given, variables=unsharded, plain_leaves=True),
        [managed[id(leaf)].sharded_param for leaf in unsharded],
        [columns.get(key) for key in in_graph],
        [[key in reached for key in in_graph] for reached in below],
    )
    _refuse_unreached_or_freed(plan)
    return plan


def _in_graph(shard: Any) -> Tensor:
    param = fsdp.unsharded_param(shard)
    sharded: Tensor = shard.sharded_param
    return sharded if param is None else param


def _refuse_unreached_or_freed(plan: ShardedPlan) -> None:
    losses = plan.losses
    with_graph = [index for index, loss in enumerate(losses.leaves) if loss.requires_grad]
    if with_graph and set(plan.columns) == {None}:
        refuse_nothing_reached(Call(losses, losses.leaves, [Pass(with_graph, plan.params)]))
    passes = [Pass([index], plan.unsharded) for index in with_graph]
    refuse_freed(Call(losses, losses.leaves, passes), thorough=True)


def _check_params(given: Params, managed: Mapping[int, Any], *, create_graph: bool) -> None:
    """Raise if `fully_shard` would not reduce the gradients of these parameters."""
    if create_graph:
        fix = "leave it out: a backward pass of fully_shard has no graph"
        raise UnsupportedGraphError(message("create_graph", "False for fully_shard", "True", fix))
    for index, variable in enumerate(given.variables):
        shard = managed.get(id(variable))
        if shard is None:
            got = "one that it does not manage, whose gradient would not be synchronized"
            fix = "call fully_shard on the module that has it, or freeze it"
        elif shard.sharded_param._post_accumulate_grad_hooks:
            got = "one with a hook that runs after accumulation"
            fix = "remove register_post_accumulate_grad_hook, or use loss.backward()"
        else:
            continue
        expected = "a parameter that fully_shard reduces"
        raise UnsupportedGraphError(message(given.path(index), expected, got, fix))


def _refuse_unsynchronized(groups: Sequence[Any]) -> None:
    """Raise if a backward pass would not reduce, or would reduce gradients of earlier passes."""
    if not all(map(fsdp.synchronizes, groups)):
        got = "one with gradient synchronization off"
        fix = "call set_requires_gradient_sync(True) before; the gradients of calls can be added up"
    elif any(map(fsdp.has_unreduced_grads, groups)):
        got = "one with gradients of earlier backward passes that are not reduced yet"
        fix = "take the gradients before them, or after the backward pass that reduces"
    else:
        return
    raise UnsupportedGraphError(message("module", "a sharded module that reduces", got, fix))


def refuse_difference(
    group: Group, descriptions: Sequence[tuple[Any, Any]], plan: ShardedPlan
) -> None:
    """Raise for the first difference: all ranks must reach the same parameters."""
    common_specs(group, descriptions, plan.path)
    by_rank = [specs for (_, specs), _ in descriptions]
    texts = [["not reached" if spec is None else "reached" for spec in specs] for specs in by_rank]
    for rank, reached in enumerate(texts):
        for index, (first, here) in enumerate(zip(texts[0], reached, strict=True)):
            if here != first:
                expected = f"{first}, as on rank 0"
                raise_difference(group, plan.path(index), rank, expected, here)
