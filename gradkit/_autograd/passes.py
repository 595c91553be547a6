"""The passes of a call: what surrounds each, in which order they run, when the graph is freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradkit._autograd import engine, jacobian
from gradkit._autograd.arrival_copies import ArrivalCapture, WriteFinder, hooks_refused
from gradkit._autograd.guarded_pass import GuardedPass
from gradkit._autograd.release import plan_release, release
from gradkit._autograd.sample_pass import Uses, run_samples, uses_by_loss
from gradkit._autograd.side_effects import Written, side_effects_put_back
from gradkit._checks.checked import step_monitor
from gradkit._checks.circumstances import (
    CREATES_GRAPH,
    GUARDED,
    HOOKS,
    OBSERVED,
    RECORDED,
    RETAINED,
    USER_CODE,
    around,
)
from gradkit._checks.eager_graph import check_call, refuse_donated
from gradkit._checks.modified_tensors import (
    edges_above_hidden,
    grad_versions,
    leaves_of_functions,
    nodes_of_functions,
    refuse_pre_hooks,
    variables_to_copy,
)
from gradkit._checks.reachability import refuse_unreached
from gradkit._compat.autograd import (
    as_batch,
    batched_mode,
    from_batch,
    record_stream,
    without_function_modes,
)
from gradkit._compat.distributed import replicated
from gradkit._compat.nodes import names_by_kind
from gradkit._compat.transforms import detach_keep_tangent, in_dual_level
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import (
    Call,
    Grads,
    Losses,
    Pass,
    params_of_each_loss,
    read_weights,
    require_graph,
)
from gradkit._core.grad_recorder import observed_tensors
from gradkit._core.graph import Subgraph
from gradkit._core.ownership import PLAIN_TYPES, owned, owned_of_each, zeros_for
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import LEAF, PyTree, Structure
from gradkit._core.results_without_graph import with_zero_derivatives
from gradkit._core.user_code import hooks_registered
from gradkit._state.grad_attribute import grads_put_back
from gradkit._state.hook_tables import hooks_kept, same_hooks_in_each_pass

_requires_grad = attrgetter("requires_grad")


@dataclass(slots=True)
class PassRunner:
    """Runs the passes of a call, among the guards that what is around it asks for."""

    call: Call
    # The variables whose gradients are copied as they arrive, by the id of the list of all.
    _copied: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def create_graph(self) -> bool:
        """Whether the gradients carry a graph."""
        return self.call.create_graph

    def grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        *,
        retain: bool,
        shared: bool = False,
    ) -> list[Tensor | None]:
        """Return the gradients of one pass of the call; they may share memory if `shared`."""
        # A seed is the cotangent of an output, of its shape; None is ones. What carries a graph may
        # always share memory.
        call = self.call
        bits = around(call) if call.around is None else call.around
        if bits & GUARDED:
            grads = self._guarded_grads(outputs, seeds, variables, bits, retain=retain)
        else:
            grads = engine.run_grad(call, outputs, variables, seeds, retain_graph=retain)
            if hooks_registered():  # the pass itself may have registered the first of the process
                versions = grad_versions(variables, grads, ())
                self.guarded(outputs, variables).refuse_modified(versions)
        return grads if shared or call.create_graph else owned(grads, variables)

    def guarded(
        self,
        outputs: Sequence[Tensor],
        variables: list[Tensor],
        copied: Sequence[Tensor] = (),
        **guards: Any,
    ) -> GuardedPass:
        """Return what the guards of a pass need to know."""
        call = self.call

        def where() -> str:
            return ", ".join(map(call.losses.path, call.differentiated[:3]))

        path, below = call.params_of(variables).path, partial(Subgraph, outputs)
        guards |= {"create_graph": call.create_graph, "ends": False}
        return GuardedPass(where, path, variables, below, copied, **guards)

    def side_effects(
        self, variables: list[Tensor], *, retain: bool
    ) -> AbstractContextManager[Written]:
        """Put back what the Functions of a call write beside returning gradients, if it has any."""
        call = self.call
        if not nodes_of_functions(call):
            return INSIDE
        paths, add = call.losses.first_paths, not call.create_graph
        return side_effects_put_back(
            leaves_of_functions(call), variables, paths, retain=retain, add=add
        )

    def _recording(self) -> AbstractContextManager[object]:
        paths, below = self.call.losses.first_paths, self.call.whole
        every = [variable for _, _, variable in self.call.variables()]
        return engine.recording(paths, below, every, recomputing=True)

    def _guarded_grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        bits: int,
        *,
        retain: bool,
    ) -> list[Tensor | None]:
        """Run a pass among what user code may do; it captures what is observed, too."""
        call, monitor, copied = self.call, step_monitor(), self.look_for_hooks(variables)
        finder = None if monitor is None else WriteFinder()
        effects = self.side_effects(variables, retain=retain)
        recording = self._recording() if bits & RECORDED else INSIDE
        guards: Any = {"effects": effects, "recording": recording, "adds": not call.create_graph}

        def execute(stack: ExitStack, capture: ArrivalCapture, written: Written) -> Grads:
            inputs, roots, given = variables, outputs, seeds
            if copied or written is not None or bits & (OBSERVED | RETAINED):
                inputs = stack.enter_context(self.observed_inputs(variables))
            if written is not None:
                written.own_pass = capture.own_pass
            if capture.needs_number or (written is not None and written.summed):
                roots = stack.enter_context(engine.own_roots(outputs, capture.own_pass.append))
            if finder is not None and bits & USER_CODE:
                given = [None if seed is None else seed.clone() for seed in seeds]
            with finder or INSIDE, INSIDE:
                grads = engine.run_grad(call, roots, inputs, given, retain_graph=retain)
            if finder is not None:
                finder.report(call.params_of(variables))
            if monitor is not None:
                monitor.note(variables, grads[: len(variables)])
                # Another optimizer may have been left in the loop, with parameters of the loss.
                monitor.note(others := [*call.whole.leaves.values()], others)
            return grads[: len(variables)]

        return self.guarded(outputs, variables, copied, **guards).run(execute, finder)

    def look_for_hooks(self, variables: list[Tensor]) -> list[Tensor]:
        """Return the variables whose gradients are copied as they arrive; looked for once."""
        if id(variables) not in self._copied:
            refuse_pre_hooks(self.call)
            self._copied[id(variables)] = variables_to_copy(self.call, variables)
        return self._copied[id(variables)]

    @contextmanager
    def observed_inputs(self, variables: list[Tensor]) -> Iterator[list[Any]]:
        """Yield what a pass is for, observed tensors too; every `.grad` is put back afterwards."""
        extra = observed_tensors()
        retained = self.retained((*variables, *(tensor for tensor, _ in extra)))
        hidden = edges_above_hidden(self.call, variables) if self.call.functions.users else ()
        with grads_put_back(list({id(t): t for t in retained}.values())):
            yield [*variables, *(edge for _, edge in extra), *hidden]

    def retained(self, tensors: Iterable[Tensor] = ()) -> list[Tensor]:
        """Return those tensors, losses and weights whose `.grad` a pass writes [D4]."""
        every = (*self.call.losses.leaves, *self.call.weights, *tensors)
        return [tensor for tensor in every if tensor.retains_grad and not tensor.is_leaf]

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of a vmapped pass, which keeps the graph; they may share memory."""
        # Seeds have the shape `[B, *output.shape]`, gradients `[B, *variable.shape]`.
        if not self.call.no_subclasses:
            with self._recording() if self.call.create_graph else INSIDE, INSIDE:
                return engine.run_grad(
                    self.call,
                    [output],
                    variables,
                    [seeds],
                    retain_graph=True,
                    is_grads_batched=True,
                )
        with batched_mode() as level, hooks_refused([output]) as roots:
            grads = engine.run_batch(self.call, roots, variables, [as_batch(seeds, level)])
            with without_function_modes(), INSIDE:
                size = len(seeds)
                grads = [None if grad is None else from_batch(grad, level, size) for grad in grads]
                record_stream(grads)
                return grads

    def backward(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor] | None,
        *,
        retain: bool,
    ) -> None:
        """Run one pass that accumulates into `.grad` of some leaves, or of all if None."""
        others: dict[int, Tensor] = {}
        if variables is not None and self.call.functions.users:
            ids = set(map(id, variables))
            hidden = [one.hidden for one in leaves_of_functions(self.call)]
            others = {key: leaf for each in hidden for key, leaf in each.items() if key not in ids}
        with grads_put_back([*others.values()]) if others else INSIDE:
            engine.run_backward(self.call, outputs, seeds, variables, retain_graph=retain)


RunnerFactory: TypeAlias = Callable[..., PassRunner]


@dataclass(slots=True)
class PassResult:
    """The gradients that the passes of a call gave."""

    call: Call
    grads: list[Grads]  # for each pass, a gradient or None for each variable
    values: PyTree = None  # the losses' values, a tree like them; for a joint pass

    def with_constants(self, params: Params) -> PassResult:
        """Return the same with a pass for every loss, which gave nothing for constants."""
        if len(self.grads) == len(self.call.losses.leaves):
            return self
        by_loss = dict(zip(self.call.differentiated, self.grads, strict=True))
        every = range(len(self.call.losses.leaves))
        nothing: Grads = [None] * len(params.variables)
        call = replace(self.call, passes=[Pass([index], params) for index in every])
        return replace(self, call=call, grads=[list(by_loss.get(i, nothing)) for i in every])


def run_jointly(
    losses: Losses,
    params: Params,
    weights: PyTree,
    *,
    unused: str,
    create_graph: bool,
    retain: bool,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
    cotangents: Sequence[Tensor] = (),
) -> PassResult:
    """Run one pass for the weighted sum of the losses, or of tensors that have these cotangents."""
    outputs: Sequence[Tensor] = losses.leaves
    seeds: list[Tensor | None] = [*cotangents] or [None] * len(outputs)  # a seed of None is 1
    learned: Sequence[Tensor] = ()
    if weights is not None:
        outputs, seeds, learned = weighted_outputs(losses, weights)
    group: Sequence[int] = range(len(outputs))
    if not all(map(_requires_grad, outputs)):
        group = require_graph(losses, outputs, [params])
    call = Call(losses, outputs, [Pass(group, params)], unused, create_graph, learned, allowed)
    check_call(call)
    if retain and (not create_graph or around(call) & CREATES_GRAPH):
        refuse_donated(call, [retain])
    if len(group) < len(outputs):  # constants have no pass
        outputs = [outputs[i] for i in group]
        seeds = [seeds[i] for i in group]
    grads = runner(call).grads(outputs, seeds, params.variables, retain=retain)
    values = None if cotangents else values_of(losses, create_graph)
    return PassResult(call, [grads], values)


def weighted_outputs(
    losses: Losses, weights: PyTree
) -> tuple[Sequence[Tensor], list[Tensor | None], list[Tensor]]:
    """Return what a pass for the sum starts from, with cotangents; weights that are part of it."""
    seeds: list[Tensor | None] = [None] * len(losses.leaves)  # a seed of None is 1
    by_loss = None if weights is None else read_weights(weights, losses)
    if by_loss is None:
        return losses.leaves, seeds, []
    outputs = list(losses.leaves)
    learned: list[Tensor] = []
    for index, weight in enumerate(by_loss):
        loss = outputs[index]
        if not isinstance(weight, Tensor):
            seeds[index] = torch.full_like(loss, float(weight), requires_grad=False)
        elif weight.requires_grad:  # the gradient is to reach the weight's own parameters
            learned.append(weight)
            with torch.enable_grad(), INSIDE:
                outputs[index] = loss * weight.reshape(loss.shape).to(loss)
        else:
            seeds[index] = weight.detach().reshape(loss.shape).to(loss, copy=True)
    return outputs, seeds, learned


def values_of(losses: Losses, create_graph: bool) -> PyTree:
    """Return the tree of the losses' values: the losses themselves, or detached copies."""
    values = losses.leaves
    for value in values:
        if not value.is_cpu:
            record_stream(values)
            break
    if not create_graph:
        is_plain = PLAIN_TYPES.issuperset(map(type, values)) and not in_dual_level()
        detached = map(Tensor.detach, values) if is_plain else map(_detached, values)
        values = list(map(Tensor.clone, detached))
    return values[0] if losses.spec is LEAF else pytree.unflatten(losses.spec, values)


def _detached(loss: Tensor) -> Tensor:
    value = detach_keep_tangent(loss)
    return value if type(loss) is Tensor else replicated(value)


def run_separately(
    losses: Losses,
    params: Params,
    *,
    unused: str,
    create_graph: bool,
    retain: bool,
    strategy: str,
    chunk_size: int | None,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run the passes for every loss that carries a graph, by itself."""
    group = require_graph(losses, losses.leaves, [params])
    passes = [Pass([index], params) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph, allowed=allowed)
    _refuse_constant_losses(call, [params] * len(losses.leaves))
    check_call(call)
    if any(map(Tensor.dim, losses.leaves)):
        jacobian.refuse_nested(params)
    run = runner(call)
    uses: dict[int, Uses] = {}
    batch: set[int] = set()
    if strategy != "sequential":
        if runner is PassRunner:
            uses = uses_by_loss(call, jacobian.FEW if strategy == "auto" else 2)
        if len(uses) < len(passes):
            batch = jacobian.choose(strategy, call)
    if not batch and not any(map(Tensor.dim, losses.leaves)):
        return PassResult(call, _run_scalars_in_turn(run, retain))

    def differentiate(index: int, variables: list[Tensor], retain: bool) -> Grads:
        loss = losses.leaves[index]
        if index in uses:
            return run_samples(call, index, uses[index], variables, retain=retain)
        if index not in batch:
            return jacobian.sequential(run, loss, variables, retain=retain)
        return jacobian.batched(run, loss, variables, retain=retain, chunk_size=chunk_size)

    return PassResult(call, run_in_turn(call, differentiate, retain))


def run_in_turn(
    call: Call,
    differentiate: Callable[[int, list[Tensor], bool], Grads],
    retain: bool,
    together: int = 0,
) -> list[Grads]:
    """Run a call's passes, one loss each, and free each part of the graph after its last pass."""
    # `differentiate` runs one pass: from a loss, for variables, retaining the graph or not. With
    # `together` passes, not 0, gradients may share memory: after so many passes, all of their
    # gradients are looked at, and what they may share lives until then.
    if (call.around or 0) & HOOKS and not hooks_kept():
        with same_hooks_in_each_pass():
            return run_in_turn(call, differentiate, retain, together)
    plans = None
    if not retain and len(call.passes) > 1:
        extra = [edge.node for _, edge in observed_tensors()]
        if call.functions.users:
            every = edges_above_hidden(call, (v for _, _, v in call.variables()))
            extra += [edge.node for edge in every]
        plans = plan_release(call, extra)
    kept = [retain] * len(call.passes) if plans is None else [plan.retain for plan in plans]
    if retain or len(kept) > 1:  # for a single loss of several elements, the engine says so
        refuse_donated(call, kept)
    names_of = None if plans is None else names_by_kind(call.whole.kinds)
    results: list[Grads] = []
    turns = enumerate(zip(call.passes, kept, strict=True))
    while some := list(islice(turns, together or 1)):
        shared: list[Grads] = []
        for turn, ((group, params), keep) in some:
            variables = params.variables
            shared.append(differentiate(group[0], variables, keep) if variables else [])
            if plans is not None and plans[turn].last_used:
                release(plans[turn].last_used, names_of)
        if together:
            shared = owned_of_each(shared, [params.variables for _, ((_, params), _) in some])
        results += shared
    return results


def _run_scalars_in_turn(run: PassRunner, retain: bool) -> list[Grads]:
    """Run the passes of a call whose losses have one element each."""
    call, bits = run.call, around(run.call)
    losses = call.losses.leaves
    captures = type(run) is PassRunner and not call.create_graph
    seed = None if bits & GUARDED or not captures else _common_seed(losses)
    # A hook of the next pass may write on what it has kept of this one.
    together = (1 if bits & USER_CODE else _TOGETHER) if captures else 0

    def differentiate(index: int, variables: list[Tensor], keep: bool) -> Grads:
        return run.grads([losses[index]], [seed], variables, retain=keep, shared=captures)

    return run_in_turn(call, differentiate, retain, together)


_TOGETHER = 4
_dtype, _device, _layout = map(attrgetter, ("dtype", "device", "layout"))


def _common_seed(losses: Sequence[Tensor]) -> Tensor | None:
    """Return ones like each of some losses; None if they are of several kinds."""
    if any(map(Tensor.dim, losses)) or not PLAIN_TYPES.issuperset(map(type, losses)):
        return None
    kinds = [set(map(read, losses)) for read in (_dtype, _device, _layout)]
    return torch.ones_like(losses[0]) if all(len(kind) == 1 for kind in kinds) else None


def grads_to_tree(
    grads: Grads, params: Params, unused: str, create_graph: bool, leading: tuple[int, ...] = ()
) -> PyTree:
    """Return the tree of gradients, zeros for None if asked for; `leading` is the loss's shape."""
    if unused == "zeros":
        grads = [
            zeros_for(variable, leading) if grad is None else grad
            for grad, variable in zip(grads, params.variables, strict=True)
        ]
    if create_graph and not all(grad is None or grad.requires_grad for grad in grads):
        grads = with_zero_derivatives(grads, params.variables)
    by_leaf: Sequence[Tensor | None] = grads
    if len(grads) < len(params.leaves):
        by_leaf = params.per_leaf(grads, None if create_graph else _clones)
    return pytree.rebuild(params.spec, by_leaf)


_clones = partial(map, Tensor.clone)


def _refuse_constant_losses(call: Call, each: Sequence[Params]) -> None:
    """Raise, under `unused="error"`, also for the params of a loss that has no pass."""
    if call.unused == "error":
        passes = [Pass([index], params) for index, params in enumerate(each)]
        refuse_unreached(replace(call, passes=passes))


def trees_by_loss(result: PassResult, params: Params, unused: str) -> PyTree:
    """Return the tree of trees of gradients; None, or zeros, for a loss without a pass."""
    losses = result.call.losses
    if unused != "zeros" and not result.call.create_graph and params.no_ties:
        return pytree.unflatten(
            losses.spec, params.unflatten_each(result.with_constants(params).grads)
        )
    trees = [
        grads_to_tree(grads, params, unused, result.call.create_graph, tuple(loss.shape))
        for grads, loss in zip(result.with_constants(params).grads, losses.leaves, strict=True)
    ]
    return pytree.unflatten(losses.spec, trees)


def read_params_of_each(
    losses: Losses, params: PyTree, *, allow_distributed: bool = False
) -> list[Params]:
    """Return the params that stand at the place of each loss in a tree of params."""
    read = partial(read_params, allow_distributed=allow_distributed)
    return list(map(read, params_of_each_loss(losses, params), _roots(losses.spec)))


@lru_cache(maxsize=64)
def _roots(spec: Structure) -> list[str]:
    return pytree.paths(spec, "params")


def run_simultaneously(
    losses: Losses,
    each: Sequence[Params],
    unused: str,
    create_graph: bool,
    retain: bool,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run a pass for each loss that carries a graph, with respect to its own params."""
    group = require_graph(losses, losses.leaves, each)
    passes = [Pass([index], each[index]) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph, allowed=allowed)
    _refuse_constant_losses(call, each)
    check_call(call)
    return PassResult(call, _run_scalars_in_turn(runner(call), retain))


def simultaneous_trees(result: PassResult, each: Sequence[Params]) -> PyTree:
    """Return the tree of gradients of each loss with respect to its own params."""
    call = result.call
    by_loss = dict(zip(call.differentiated, result.grads, strict=True))
    trees = [
        grads_to_tree(
            by_loss.get(i, [None] * len(own.variables)), own, call.unused, call.create_graph
        )
        for i, own in enumerate(each)
    ]
    return pytree.unflatten(call.losses.spec, trees)
