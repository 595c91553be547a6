"""The passes for fully_shard: its own backward passes, with every `.grad` restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradkit._autograd.passes import PassResult
from gradkit._autograd.runner import PassRunner
from gradkit._compat import fsdp
from gradkit._core.call import Pass
from gradkit._core.params import Params
from gradkit._state.dot_grad import grads_put_back
from gradkit.distributed._agreement import agree_or_raise
from gradkit.distributed._distributed_call import DistributedCall
from gradkit.distributed._group import Group, collective_errors, join_group
from gradkit.distributed._sharded_plan import ShardedPlan, make_plan, refuse_difference
from gradkit.errors import UnsupportedGraphError, message


def run(call: DistributedCall, modules: Sequence[nn.Module]) -> tuple[PassResult, Params]:
    """Return what FSDP's backward passes leave in `.grad`, and the sharded params."""
    _refuse_former_fsdp(modules)
    states = fsdp.states_of(modules)
    groups = fsdp.groups_of(states)
    shards = [shard.sharded_param for shard in fsdp.shards_of(groups)]
    ranks = [join_group(handle, call.name) for handle in _handles(shards)]
    plan = _agree_on_plan(ranks, lambda: make_plan(call, groups))

    runner = partial(
        _ShardedRunner, shards=plan.shards, all_shards=shards, group=ranks[0], states=states
    )
    allowed = (fsdp.POST_BACKWARD,)
    result = call.run(plan.losses, plan.unsharded, allowed=allowed, runner=runner)
    grads = [[None if c is None else row[c] for c in plan.columns] for row in result.grads]
    passes = [Pass(indices, plan.params) for indices, _ in result.call.passes]
    return replace(result, call=replace(result.call, passes=passes), grads=grads), plan.params


def _refuse_former_fsdp(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if not fsdp.is_fully_sharded(module):
            expected = "one that torch.distributed.fsdp.fully_shard was called on"
            got = f"the {type(module).__name__} of the former FSDP"
            fix = "move to fully_shard, or use loss.backward()"
            raise UnsupportedGraphError(message("module", expected, got, fix))


def _handles(shards: Sequence[Any]) -> list[Any]:
    """Return the process groups of all dimensions of the shards' meshes."""
    meshes = {id(shard.device_mesh): shard.device_mesh for shard in shards}
    return [mesh.get_group(dim) for mesh in meshes.values() for dim in range(mesh.ndim)]


def _agree_on_plan(ranks: Sequence[Group], make: Callable[[], ShardedPlan]) -> ShardedPlan:
    """Return the plan, agreed on in the groups of all mesh dimensions; if one raises, all raise."""
    errors: list[Exception] = []
    plans: list[ShardedPlan] = []

    def read() -> tuple[ShardedPlan, tuple[object, ...]]:
        if errors:
            raise errors[0]
        if not plans:
            plans.append(make())
        return plans[0], plans[0].description()

    for group in ranks:
        try:
            plan, descriptions = agree_or_raise(group, read, ShardedPlan.paths)
            if descriptions is not None:
                refuse_difference(group, descriptions, plan)
        except Exception as error:  # raised below: the other groups must take part first
            errors.append(error)
    if errors:
        raise errors[0]
    return plans[0] if plans else make()  # which raises: there is no parameter


@dataclass(frozen=True)
class _ShardedRunner(PassRunner):
    """A runner whose gradients are what a backward pass leaves in `.grad`."""

    shards: Sequence[Tensor] = ()  # the sharded parameters of the variables
    all_shards: Sequence[Tensor] = ()  # those whose `.grad` a pass may write
    states: Sequence[Any] = ()  # of the modules
    group: Group | None = None

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Run one backward pass; see `PassRunner.grads`."""
        assert self.group is not None
        written = {id(tensor): tensor for tensor in (*self.all_shards, *self.retained(()))}
        with (
            grads_put_back(list(written.values())),
            collective_errors(self.group, backend_only=True),
            _reset_on_error(self.states),
        ):
            # For these variables only: other leaves may have hooks that step an optimizer.
            self.backward(outputs, seeds, variables, retain=retain)
            # Copies: the shards of a module are parts of one buffer.
            return [None if t.grad is None else t.grad.clone() for t in self.shards]

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Raise, so that the passes run one by one."""
        raise RuntimeError("fully_shard reduces the gradients of one backward pass at a time")


@contextmanager
def _reset_on_error(states: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        fsdp.reset_iteration(states)
        raise
