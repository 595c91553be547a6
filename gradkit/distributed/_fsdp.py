"""The passes for fully_shard: its own backward passes, with every `.grad` put back.

Its sharded parameters are not in the graph: gradients arrive at the unsharded ones, and hooks of
its own reduce and scatter them into the `.grad` of the sharded ones [M5, M6].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from gradkit._autograd.engine import Run
from gradkit._autograd.passes import PassResult
from gradkit._checks import unsupported
from gradkit._checks.call import refuse_freed, unreached
from gradkit._core import graph
from gradkit._core.inputs import Losses, Params, read_params, require_graph
from gradkit._state.dot_grad import grads_put_back
from gradkit.distributed._agreement import (
    Group,
    agree_or_raise,
    agreed_leaves,
    join,
    leaf_of,
    named,
    refuse,
)
from gradkit.distributed._call import DistributedCall
from gradkit.errors import UnreachedParamError, UnsupportedGraphError, message

_HOOK = "RegisterPostBackwardFunctionBackward"


def run(work: DistributedCall, modules: Sequence[nn.Module]) -> tuple[PassResult, Params]:
    """Run the passes of torch's own engine, and return what they leave in `.grad`.

    Args:
        work: The call.
        modules: The modules that `fully_shard` was called on.

    Returns:
        What the passes brought; and the params, sharded.
    """
    states = _states(modules)
    groups = [group for state in states for group in unsupported.fsdp_groups(state)]
    shards = _shards_in(groups)
    made: list[_Plan] = []

    def read() -> tuple[object, ...]:
        if not made:
            _refuse_unreduced(groups)
            made.append(_Plan.of(work, shards))
        return made[0].described()

    def explain() -> tuple[str, ...]:
        plan = made[0]
        return tuple(map(plan.path, range(len(plan.reached) * len(plan.columns))))

    ranks = [join(handle, work.call) for handle in _handles(shards)]
    _settle_all(ranks, read, explain, made)
    return made[0].run(ranks[0], groups, states)


def _settle_all(
    ranks: Sequence[Group],
    read: Callable[[], tuple[object, ...]],
    explain: Callable[[], tuple[str, ...]],
    made: Sequence[_Plan],
) -> None:
    """Settle with the ranks of every dimension of a mesh; who hears of an error passes it on."""
    errors: list[Exception] = []

    def read_or_fail() -> tuple[object, ...]:
        if errors:
            raise errors[0]
        return read()

    for group in ranks:
        try:
            theirs = agree_or_raise(group, read_or_fail, explain)
            if theirs is not None:
                _refuse_difference(group, theirs, made[0])
        except Exception as error:  # of any kind: the ranks of other dimensions are to hear of it
            errors.append(error)
    if errors:
        raise errors[0]


def _shards_in(groups: Sequence[Any]) -> dict[int, Any]:
    """Return all sharded parameters, by id.

    By that of the sharded and by that of the unsharded parameter: a module shows the one or the
    other as its own, and the graph has the unsharded one.
    """
    found: dict[int, Any] = {}
    for group in groups:
        for shard in group.fsdp_params:
            found[id(shard.sharded_param)] = shard
            for other in ("_unsharded_param", "_sharded_post_forward_param"):
                if hasattr(shard, other):
                    found[id(getattr(shard, other))] = shard
    return found


def _states(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what `fully_shard` knows of the modules, and of all that runs with them."""
    states: dict[int, Any] = {}
    for module in modules:
        if not hasattr(module, "_get_fsdp_state"):
            _refuse_old(module)
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        # A pass through one module writes `.grad` of all that the graph goes through.
        for one in (state, *state._state_ctx.all_states):
            states[id(one)] = one
    return list(states.values())


def _refuse_old(module: nn.Module) -> NoReturn:
    raise UnsupportedGraphError(
        message(
            "module",
            "one that torch.distributed.fsdp.fully_shard was called on",
            f"the {type(module).__name__} of the former FSDP",
            "move to fully_shard, or use loss.backward()",
        )
    )


def _handles(shards: dict[int, Any]) -> list[Any]:
    meshes = {id(s.sharded_param.device_mesh): s.sharded_param.device_mesh for s in shards.values()}
    return [mesh.get_group(dim) for mesh in meshes.values() for dim in range(mesh.ndim)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be done on this rank.

    Attributes:
        work: The call.
        target: The losses.
        wanted: The params, sharded.
        inner: What stands for them in the graph, as far as it is there.
        outer: For each of those the sharded parameter, whose `.grad` a pass writes.
        columns: For each variable of the params its place among the leaves; None if not reached.
        reached: For each loss and variable, whether the one reaches the other; all losses together,
            for the gradient of their sum.
    """

    work: DistributedCall
    target: Losses
    wanted: Params
    inner: Params
    outer: list[Tensor]
    columns: list[int | None]
    reached: list[list[bool]]

    @staticmethod
    def of(work: DistributedCall, shards: dict[int, Any]) -> _Plan:
        """Read what the caller gave, and refuse what would not come out right."""
        target, given = work.target(), read_params(work.module, wrapped=True)
        _refuse_params(given, shards, create_graph=work.create_graph)
        variables = [shards[id(variable)].sharded_param for variable in given.variables]
        wanted = replace(given, variables=variables)
        arrivals = [id(getattr(shards[id(v)], "_unsharded_param", v)) for v in given.variables]
        work.check(target)
        live = [target.leaves[index] for index in require_graph(target, target.leaves)]
        in_graph = graph.leaf_tensors(graph.nodes_below(live))
        leaves = [in_graph[arrival] for arrival in arrivals if arrival in in_graph]
        places = {id(leaf): index for index, leaf in enumerate(leaves)}
        starts = [live] if work.scalar else [[t] if t.requires_grad else [] for t in target.leaves]
        below = [graph.leaves_of(graph.nodes_below(start)) for start in starts]
        plan = _Plan(
            work,
            target,
            wanted,
            replace(given, variables=leaves, plain_leaves=True),
            [shards[id(leaf)].sharded_param for leaf in leaves],
            [places.get(arrival) for arrival in arrivals],
            [[arrival in reached for arrival in arrivals] for reached in below],
        )
        plan._refuse_nothing_and_freed()
        return plan

    def _refuse_nothing_and_freed(self) -> None:
        leaves = self.target.leaves
        live = [index for index, loss in enumerate(leaves) if loss.requires_grad]
        if live and set(self.columns) == {None}:
            raise UnreachedParamError(unreached(self.target, [(live, self.wanted)], 0))
        run = Run(leaves, self.target.path)
        refuse_freed(run, leaves, [([index], self.inner) for index in live], thorough=True)

    def described(self) -> tuple[object, ...]:
        """Return what must be the same on all ranks."""
        reached = [
            leaf_of(variable) if reached else None
            for row in self.reached
            for variable, reached in zip(self.wanted.variables, row, strict=True)
        ]
        return self.work.structure(self.target, self.wanted), tuple(reached)

    def path(self, index: int) -> str:
        """Return the way to a gradient."""
        row, column = divmod(index, len(self.wanted.variables))
        of = "losses" if self.work.scalar else self.target.path(row)
        return f"the gradient of {of} by {self.wanted.path(column)}"

    def run(
        self, group: Group, groups: Sequence[Any], states: Sequence[Any]
    ) -> tuple[PassResult, Params]:
        """Run the passes."""
        every = [shard.sharded_param for one in groups for shard in one.fsdp_params]

        def run_as(run: Run) -> Run:
            how = {field.name: getattr(run, field.name) for field in fields(run)}
            return _ShardedRun(**how, outer=self.outer, every=every, group=group, states=states)

        found = self.work.run(self.target, self.inner, allowed=(_HOOK,), run_as=run_as)
        grads = [[None if c is None else row[c] for c in self.columns] for row in found.grads]
        plan = [(group, self.wanted) for group, _ in found.plan]
        return replace(found, plan=plan, grads=grads), self.wanted


@dataclass(frozen=True, slots=True)
class _ShardedRun(Run):
    """A run whose gradients are what a backward pass leaves in `.grad`.

    Attributes:
        outer: For each variable the sharded parameter, whose `.grad` the pass writes.
        every: All sharded parameters whose `.grad` a pass may write.
        group: The ranks.
        states: What `fully_shard` knows of the modules.
    """

    outer: Sequence[Tensor] = ()
    every: Sequence[Tensor] = ()
    states: Sequence[Any] = ()
    group: Group | None = None

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Run one backward pass; see `Run.grads`."""
        assert self.group is not None
        with ExitStack() as stack:
            self._put_grads_back([], [], stack)
            stack.enter_context(grads_put_back(list({id(t): t for t in self.every}.values())))
            stack.enter_context(named(self.group, backend_only=True))
            stack.enter_context(_started_anew_if_it_fails(self.states))
            # Not to all leaves: others may have hooks that reduce, or step an optimizer.
            self.backward(outputs, seeds, variables, retain=retain)
            # Copies: the shards of a module are parts of one buffer.
            return [None if t.grad is None else t.grad.clone() for t in self.outer]

    def grads_of_batch(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Refuse a batched pass, which `fully_shard` cannot reduce.

        Raises:
            RuntimeError: Always; the passes are run one by one then.
        """
        raise RuntimeError("fully_shard reduces the gradients of one backward pass at a time")


@contextmanager
def _started_anew_if_it_fails(states: Sequence[Any]) -> Iterator[None]:
    """Let later steps reduce, after one in which a hook of the user's, say, has raised."""
    try:
        yield
    except BaseException:
        for state in states:
            if state._is_root and hasattr(state, "_reset_iter_state"):
                state._reset_iter_state()
        raise


def _refuse_params(given: Params, shards: dict[int, Any], *, create_graph: bool) -> None:
    """Raise if `fully_shard` would not give the gradients of these parameters.

    Raises:
        UnsupportedGraphError: So it is.
    """
    if create_graph:
        do = "leave it out: a backward pass of fully_shard has no graph"
        raise UnsupportedGraphError(message("create_graph", "False for fully_shard", "True", do))
    for index, variable in enumerate(given.variables):
        shard = shards.get(id(variable))
        if shard is None:
            came = "one that it does not manage: its gradient would be this process's alone"
            do = "call fully_shard on the module that has it, or freeze it"
        elif shard.sharded_param._post_accumulate_grad_hooks:
            came = "one with a hook that runs after accumulation"
            do = "remove register_post_accumulate_grad_hook, or use loss.backward()"
        else:
            continue
        where, wanted = given.path(index), "a parameter that fully_shard reduces"
        raise UnsupportedGraphError(message(where, wanted, came, do))


def _refuse_unreduced(groups: Sequence[Any]) -> None:
    """Raise if a backward pass would not reduce now, or more than its own gradients.

    Raises:
        UnsupportedGraphError: So it is.
    """
    shards = [shard for group in groups for shard in group.fsdp_params]
    waiting = [shard.unsharded_accumulated_grad for shard in shards]
    waiting += [s._unsharded_param.grad for s in shards if hasattr(s, "_unsharded_param")]
    partial = (getattr(group, "_partial_reduce_output", None) for group in groups)
    if not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        came = "one with gradient synchronization off"
        do = "call set_requires_gradient_sync(True) before; the gradients of calls can be added up"
    elif any(grad is not None for grad in (*waiting, *partial)):
        came = "one with gradients of former backward passes that are not reduced yet"
        do = "take the gradients before them, or after the backward pass that reduces"
    else:
        return
    raise UnsupportedGraphError(message("module", "a sharded module that reduces", came, do))


def _refuse_difference(group: Group, theirs: list[tuple[Any, Any]], plan: _Plan) -> None:
    agreed_leaves(group, theirs, plan.path)
    for (_, leaves), _ in theirs:
        for index, leaf in enumerate(leaves):
            first = theirs[0][0][1][index]
            if (leaf is None) != (first is None):
                rank = theirs.index(next(one for one in theirs if one[0][1] is leaves))
                had, has = ("not reached" if one is None else "reached" for one in (first, leaf))
                refuse(group, plan.path(index), rank, f"{had}, as on rank 0", has)
