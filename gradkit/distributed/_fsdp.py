"""The passes for `fully_shard`: its own backward passes, with every `.grad` restored.

The graph holds the unsharded parameters; FSDP's backward hooks reduce-scatter their gradients into
the `.grad` of the shards [M5].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradkit._autograd.passes import PassResult, PassRunner
from gradkit._checks.eager_graph import refuse_freed
from gradkit._checks.reachability import refuse_nothing_reached
from gradkit._compat import distributed
from gradkit._compat.autograd import post_accumulate_hooks
from gradkit._core.call import Call, Losses, Pass
from gradkit._core.graph import GraphView
from gradkit._core.params import Params
from gradkit._state.grad_attribute import grads_put_back
from gradkit.distributed._agreement import (
    Description,
    GradSpec,
    Group,
    agree_in_all,
    collective_errors,
    require_group,
)
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.errors import StructureError, UnsupportedGraphError, message


def run(
    call: DistributedCall, modules: Sequence[nn.Module], *, reduced: bool = True
) -> tuple[PassResult, Params]:
    """Return what FSDP's backward passes leave in `.grad`, and the sharded params."""
    # `reduced=False`: the gradients of this rank's losses by the whole parameters.
    _refuse_former_fsdp(modules)
    states = distributed.states_of(modules)
    groups = distributed.groups_of(states)
    shards = [shard.sharded_param for shard in distributed.shards_of(groups)]
    ranks = require_groups(modules, call.name)
    # The groups of all mesh dimensions agree: if one rank raises, all raise.
    plan = agree_in_all(ranks, partial(_make_plan, call, groups), same_reach=True)
    written = plan.shards if reduced else ()
    runner = partial(
        _ShardedRunner, shards=written, all_shards=shards, group=ranks[0], states=states
    )
    allowed = (distributed.POST_BACKWARD,)
    result = call.run(plan.losses, plan.unsharded, allowed=allowed, runner=runner)
    grads = [[None if c is None else row[c] for c in plan.columns] for row in result.grads]
    passes = [Pass(indices, plan.params) for indices, _ in result.call.passes]
    return replace(result, call=replace(result.call, passes=passes), grads=grads), plan.params


def require_groups(
    modules: Sequence[nn.Module], call: str, *, one_mesh: bool = False
) -> list[Group]:
    """Return the groups of all dimensions of the modules' meshes; raise if there may be but one."""
    groups = distributed.groups_of(distributed.states_of(modules))
    meshes = [shard.sharded_param.device_mesh for shard in distributed.shards_of(groups)]
    each = dict.fromkeys(meshes)  # equal if of the same ranks
    if one_mesh and len(each) > 1:
        fix = "mean(group=), the process group of all ranks"
        raise StructureError(message(call, "modules of one mesh", "several", fix))
    handles = [mesh.get_group(dim) for mesh in each for dim in range(mesh.ndim)]
    return [require_group(handle, call) for handle in handles]


def _refuse_former_fsdp(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if not distributed.is_fully_sharded(module):
            expected = "one that torch.distributed.fsdp.fully_shard was called on"
            got = f"the {type(module).__name__} of the former FSDP"
            fix = "move to fully_shard, or use loss.backward()"
            raise UnsupportedGraphError(message("module", expected, got, fix))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The passes of a call on this rank, checked before any rank runs one."""

    losses: Losses
    params: Params  # whose variables are the sharded parameters
    unsharded: Params  # whose variables are the unsharded parameters in the graph
    shards: list[Tensor]  # the sharded parameters of those, whose `.grad` a pass writes
    columns: list[int | None]  # of `params` in `unsharded`; None if no loss reaches the parameter


def _make_plan(call: DistributedCall, groups: Sequence[Any]) -> tuple[_Plan, Description]:
    """Return the plan of a call, checked on this rank, and what must be the same on all."""
    _refuse_unsynchronized(groups)
    managed = {
        id(p): s for s in distributed.shards_of(groups) for p in distributed.module_params(s)
    }
    losses, given = call.read()
    _check_params(given, managed, create_graph=call.create_graph)
    shards = [managed[id(variable)] for variable in given.variables]
    sharded = [shard.sharded_param for shard in shards]
    # A module shows the sharded or the unsharded parameter; the graph holds the unsharded one.
    pairs = zip(sharded, map(distributed.unsharded_param, shards), strict=True)
    in_graph = [id(shard if full is None else full) for shard, full in pairs]
    view = GraphView(losses.leaves)
    every = range(len(losses.leaves))
    leaves = view.below(every).leaves
    unsharded = [leaves[key] for key in in_graph if key in leaves]
    columns = {id(leaf): index for index, leaf in enumerate(unsharded)}
    groups_of_losses = [every] if call.joint else [[index] for index in every]
    # The gradients have these, by loss and variable.
    specs = tuple(
        GradSpec.of(param) if key in reached else None
        for reached in [view.below(group).leaves for group in groups_of_losses]
        for key, param in zip(in_graph, sharded, strict=True)
    )
    plan = _Plan(
        losses,
        replace(given, variables=sharded),
        replace(given, variables=unsharded, no_subclasses=True, only_leaves=True),
        [managed[id(leaf)].sharded_param for leaf in unsharded],
        [columns.get(key) for key in in_graph],
    )
    _refuse_unreached_or_freed(plan)
    path = partial(call.grad_path, losses, plan.params)
    invariants = call.rank_invariants(losses, plan.params)
    return plan, Description(invariants, specs, partial(map, path, range(len(specs))))


def _refuse_unreached_or_freed(plan: _Plan) -> None:
    losses = plan.losses
    with_graph = [index for index, loss in enumerate(losses.leaves) if loss.requires_grad]
    if set(plan.columns) == {None}:
        refuse_nothing_reached(Call(losses, losses.leaves, [Pass(with_graph, plan.params)]))
    passes = [Pass([index], plan.unsharded) for index in with_graph]
    refuse_freed(Call(losses, losses.leaves, passes), thorough=True)


def _check_params(given: Params, managed: Mapping[int, Any], *, create_graph: bool) -> None:
    """Raise if `fully_shard` would not reduce the gradients of these parameters."""
    if create_graph:
        fix = "gradkit.distributed.make_functional(module, mesh), and gradkit.value_and_grads"
        raise UnsupportedGraphError(message("create_graph", "False for fully_shard", "True", fix))
    for index, variable in enumerate(given.variables):
        shard = managed.get(id(variable))
        if shard is None:
            got = "one that it does not manage, whose gradient would not be synchronized"
            fix = "call fully_shard on the module that has it, or freeze it"
        elif post_accumulate_hooks(shard.sharded_param):
            got = "one with a hook that runs after accumulation"
            fix = "remove register_post_accumulate_grad_hook, or use loss.backward()"
        else:
            continue
        expected = "a parameter that fully_shard reduces"
        raise UnsupportedGraphError(message(given.path(index), expected, got, fix))


def _refuse_unsynchronized(groups: Sequence[Any]) -> None:
    """Raise if a backward pass would not reduce, or would reduce gradients of earlier passes."""
    if not all(map(distributed.synchronizes, groups)):
        got = "one with gradient synchronization off"
        fix = "call set_requires_gradient_sync(True) before; the gradients of calls can be added up"
    elif any(map(distributed.has_unreduced_grads, groups)):
        got = "one with gradients of earlier backward passes that are not reduced yet"
        fix = "take the gradients before them, or after the backward pass that reduces"
    else:
        return
    raise UnsupportedGraphError(message("module", "a sharded module that reduces", got, fix))


@dataclass(slots=True, kw_only=True)
class _ShardedRunner(PassRunner):
    """A runner whose gradients are what a backward pass leaves in `.grad`."""

    shards: Sequence[Tensor]  # the sharded parameters of the variables; none: not to be reduced
    all_shards: Sequence[Tensor]  # the shards whose `.grad` a pass may write
    states: Sequence[Any]  # of the modules
    group: Group

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
        shared: bool = False,
    ) -> list[Tensor | None]:
        """Run one backward pass; see `PassRunner.grads`."""
        written = {id(tensor): tensor for tensor in (*self.all_shards, *self.retained())}
        restored = grads_put_back(list(written.values()))
        with restored, collective_errors(self.group, backend_only=True):
            try:
                if not self.shards:  # FSDP's hooks gather, and see no gradient to reduce
                    return PassRunner.grads(self, outputs, seeds, variables, retain=retain)
                # Only these variables get one: other leaves may have hooks that step an optimizer.
                self.backward(outputs, seeds, variables, retain=retain)
                # Copies: the shards of a module are parts of one buffer.
                return [None if t.grad is None else t.grad.clone() for t in self.shards]
            except BaseException:
                distributed.reset_iteration(self.states)
                raise

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Raise, so that the passes run one by one."""
        raise RuntimeError("fully_shard reduces the gradients of one backward pass at a time")
