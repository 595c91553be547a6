"""The passes of a call: what surrounds each, in which order they run, when the graph is freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradkit._autograd import jacobian
from gradkit._autograd.arrival_copies import (
    ArrivalCapture,
    WriteFinder,
    copied_on_arrival,
    hooks_refused,
    memory_address,
    without_shared_memory,
)
from gradkit._autograd.engine import run_backward, run_batch, run_grad
from gradkit._checks.checked import is_checked, step_monitor
from gradkit._checks.eager_graph import check_call, refuse_donated
from gradkit._checks.higher_derivatives import refuse_undifferentiable
from gradkit._checks.modified_tensors import (
    grad_versions,
    refuse_modified,
    user_code_may_run_in,
    variables_to_copy,
    variables_to_copy_inside,
)
from gradkit._checks.reachability import refuse_unreached
from gradkit._compat.autograd import as_batch, batched_mode, from_batch, without_function_modes
from gradkit._compat.distributed import replicated
from gradkit._compat.nodes import raise_freed, saved_names
from gradkit._compat.transforms import detach_keep_tangent, unbatched
from gradkit._compat.undoing import INSIDE, undo_stack
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
from gradkit._core.grad_recorder import any_observers, observed_tensors
from gradkit._core.graph import OwnNodes, Subgraph
from gradkit._core.ownership import owned, zeros_for
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.results_without_graph import with_zero_derivatives
from gradkit._core.user_code import functions_alive, hooks_registered
from gradkit._state.grad_attribute import grads_put_back
from gradkit._torch_bugs.node_formulas import differentiated_by_formula


class ReleasePlan(NamedTuple):
    """What one of several passes does with the graph."""

    retain: bool  # a later pass executes some of the same nodes
    last_used: Collection[Node] = ()  # if so, those that no later pass executes


def plan_release(call: Call, extra: Sequence[Node]) -> list[ReleasePlan]:
    """Return a plan for each pass, where every pass also reaches the `extra` nodes."""
    first = call.passes[0].params
    # A loss without elements has no pass of its own, so its nodes may never be executed.
    same_params = all(one.params is first for one in call.passes) and all(
        call.outputs[one.losses[0]].numel() for one in call.passes
    )
    if same_params:
        below = call.graph.below(call.differentiated)
        return plan_parts(below.parts, below.leading_to(first.variables, extra))
    return plan_sets([
        call.graph.below(group).leading_to(
            params.variables if call.outputs[group[0]].numel() else [], extra
        )
        for group, params in call.passes
    ])


def plan_sets(executed: Sequence[set[Node]]) -> list[ReleasePlan]:
    """Return the plans of passes that execute these nodes."""
    later: set[Node] = set()
    plans: list[ReleasePlan] = []
    for nodes in reversed(executed):
        shared = not nodes.isdisjoint(later)
        plans.append(ReleasePlan(shared, nodes - later if shared else ()))
        later |= nodes
    return plans[::-1]


def plan_parts(parts: Sequence[OwnNodes], executed: set[Node]) -> list[ReleasePlan]:
    """Return the plans of passes that execute all of these nodes that are below their losses."""
    # So whatever is below a node that a later pass executes, that pass executes, too.
    return [
        ReleasePlan(True, [node for node in part.nodes if node in executed])
        if not executed.isdisjoint(part.shared)
        else ReleasePlan(False)
        for part in parts
    ]


def release(nodes: Iterable[Node], names_of: Mapping[type, tuple[str, ...]] | None = None) -> None:
    """Drop the tensors that these nodes have saved, as the engine does without `retain_graph`."""
    # `names_of`: by `names_by_kind`, where that is known. Python cannot tell a node to release its
    # tensors, but it can give each a pack hook, which replaces the tensor by what the hook returns.
    # A tensor that has hooks already (a checkpoint's, or one kept on another device) cannot have
    # others: it stays until its graph is freed.
    for node in nodes:
        kind = type(node)
        for name in saved_names(kind) if names_of is None else names_of.get(kind, ()):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # a custom Function that has lost its tensors
                continue
            for tensor in saved if isinstance(saved, tuple) else (saved,):
                try:
                    tensor.register_hooks(_drop, raise_freed)
                except RuntimeError:  # it has hooks, is lost already, or is None
                    continue


def _drop(_: Tensor) -> None:
    return None


_version = attrgetter("_version")


@dataclass(frozen=True, slots=True)
class InnerPass:
    """A pass that ends at all of its variables."""

    where: str  # what errors call its roots
    path: Callable[[int], str]  # what they call a variable, by its number
    variables: Sequence[Tensor]  # what it differentiates with respect to
    below: Subgraph  # of its roots
    cotangents: Sequence[Tensor | None] = ()  # of its roots, if the caller has made them

    def guarded(
        self, run: Callable[[], list[Tensor | None]], *, create_graph: bool
    ) -> list[Tensor | None]:
        """Return the gradients of `run`, which is the pass; raise if the user's code spoils one."""
        formulas = differentiated_by_formula(self.below) if create_graph else nullcontext()
        functions = functions_alive().users
        if not (functions or hooks_registered()):
            with formulas:
                return run()
        before = _writes_before(self.cotangents)
        with undo_stack() as stack:
            stack.enter_context(formulas)
            if create_graph and functions:
                stack.enter_context(refuse_undifferentiable(lambda: self.where, self.below))
            copied = variables_to_copy_inside(self.variables, self.below if functions else None)
            stack.enter_context(copied_on_arrival(copied))
            if is_checked():
                stack.enter_context(without_shared_memory(self.below.nodes))
            grads = run()
        arrived = [None if grad is None else unbatched(grad) for grad in grads]
        versions = grad_versions(self.variables, arrived, copied)
        if before:  # a gradient may be a cotangent itself
            for index in versions:
                versions[index] -= before.get(memory_address(cast("Tensor", arrived[index])), 0)
        refuse_modified(lambda: self.where, self.path, self.variables, self.below, versions)
        return grads


def _writes_before(cotangents: Iterable[Tensor | None]) -> dict[int, int]:
    """Return how often each cotangent had been written on before the pass, by its memory."""
    given = [unbatched(cotangent) for cotangent in cotangents if cotangent is not None]
    counted = [cotangent for cotangent in given if not cotangent.is_inference()]
    written = sorted(filter(_version, counted), key=_version)
    return {memory_address(cotangent): cotangent._version for cotangent in written}


@dataclass(slots=True)
class PassRunner:
    """Runs the passes of a call."""

    call: Call
    weights: Sequence[Tensor] = ()  # of the losses: those that are part of the graph
    _copied_variables: dict[int, tuple[list[Tensor], bool]] = field(default_factory=dict)

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
    ) -> list[Tensor | None]:
        """Return the gradients of one pass of the call, owned unless they carry a graph."""
        # A seed is the cotangent of an output, of its shape; None is ones.
        copied, runs_as_it_is = self.look_for_hooks(variables)
        versions: dict[int, int] = {}
        if not runs_as_it_is or any_observers():
            grads, versions = self._captured_grads(outputs, seeds, variables, copied, retain=retain)
        else:
            grads = run_grad(self.call, outputs, variables, seeds, retain_graph=retain)
        if len(copied) < len(variables) and user_code_may_run_in(self.call):
            versions |= grad_versions(variables, grads, copied)
        if versions:
            self.refuse_modified(outputs, variables, versions)
        return grads if self.call.create_graph else owned(grads, variables)

    def refuse_modified(
        self, outputs: Sequence[Tensor], variables: list[Tensor], versions: Mapping[int, int]
    ) -> None:
        """Raise if a gradient that has this version, by the variable's number, was written on."""

        def where() -> str:
            return ", ".join(map(self.call.losses.path, self.call.differentiated[:3]))

        path = self.params_of(variables).path
        refuse_modified(where, path, variables, Subgraph(outputs), versions)

    def _captured_grads(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor],
        copied: list[Tensor],
        *,
        retain: bool,
    ) -> tuple[list[Tensor | None], dict[int, int]]:
        """Run a pass that also captures what is observed, and that leaves every `.grad` alone."""
        # Returns the gradients, and the versions that those that were copied late had by then.
        with undo_stack() as stack:
            inputs = stack.enter_context(self.observed_inputs(variables))
            create = self.call.create_graph
            monitor = step_monitor()
            finder = None if monitor is None else WriteFinder()
            capture = ArrivalCapture(variables, copied, stack, create_graph=create, finder=finder)
            roots, cotangents = [*outputs, *capture.roots], [*seeds, *(None for _ in capture.roots)]
            inputs += capture.leaves
            if finder is not None and user_code_may_run_in(self.call):
                nodes = self.call.graph.below(self.call.differentiated).nodes
                stack.enter_context(without_shared_memory(nodes, finder.note_copy))
                cotangents = [None if seed is None else seed.clone() for seed in cotangents]
            with finder or nullcontext(), INSIDE:
                grads = run_grad(self.call, roots, inputs, cotangents, retain_graph=retain)
            if finder is not None:
                finder.report(self.params_of(variables))
            if monitor is not None:
                monitor.note(variables, grads[: len(variables)])
            return capture.replace(grads[: len(variables)]), capture.versions

    @contextmanager
    def observed_inputs(self, variables: list[Tensor]) -> Iterator[list[Any]]:
        """Yield what a pass is for, observed tensors too; every `.grad` is put back afterwards."""
        extra = observed_tensors()
        retained = self.retained((*variables, *(tensor for tensor, _ in extra)))
        with grads_put_back(list({id(t): t for t in retained}.values())):
            yield [*variables, *(edge for _, edge in extra)]

    def params_of(self, variables: list[Tensor]) -> Params:
        """Return the params whose variables these are."""
        for one in self.call.passes:
            if one.params.variables is variables:
                return one.params
        raise AssertionError("the variables are not those of a pass of the call")

    def look_for_hooks(self, variables: list[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the variables whose gradients are copied on arrival; whether a pass runs as it is.

        It does if it copies none, and writes no `.grad`. Looked for once a call.
        """
        if not self._copied_variables:
            every, retained = self.call.params, self.retained()
            for params, copied in zip(every, variables_to_copy(self.call, every), strict=True):
                writes = retained or (not params.only_leaves and self.retained(params.variables))
                self._copied_variables[id(params.variables)] = copied, not copied and not writes
        return self._copied_variables[id(variables)]

    def retained(self, tensors: Iterable[Tensor] = ()) -> list[Tensor]:
        """Return the non-leaf tensors whose `.grad` a pass writes: retain_grad() was called."""
        # Of those given, and of the losses and weights [D4].
        every = (*self.call.losses.leaves, *self.weights, *tensors)
        return [tensor for tensor in every if tensor.retains_grad and not tensor.is_leaf]

    def batched_grads(
        self, output: Tensor, seeds: Tensor, variables: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of a vmapped pass, which keeps the graph; they may share memory."""
        # From seeds of shape `[B, *output.shape]` to gradients of shape `[B, *variable.shape]`.
        if not self.call.no_subclasses:
            return run_grad(
                self.call, [output], variables, [seeds], retain_graph=True, is_grads_batched=True
            )
        with batched_mode() as level, hooks_refused():
            grads = run_batch(self.call, [output], variables, [as_batch(seeds, level)])
            with without_function_modes(), INSIDE:
                size = len(seeds)
                return [None if grad is None else from_batch(grad, level, size) for grad in grads]

    def backward(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        variables: list[Tensor] | None,
        *,
        retain: bool,
    ) -> None:
        """Run one pass that accumulates into `.grad` of some leaves, or of all if None."""
        run_backward(self.call, outputs, seeds, variables, retain_graph=retain)


RunnerFactory: TypeAlias = Callable[..., PassRunner]


@dataclass(slots=True)
class PassResult:
    """The gradients that the passes of a call gave."""

    call: Call
    grads: list[Grads]  # for each pass, a gradient or None for each variable
    values: PyTree = None  # those of the losses, a tree like them; for a joint pass

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
    retain_graph: bool | None,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run one pass for the weighted sum of the losses."""
    by_loss = read_weights(weights, losses)
    outputs, seeds = weighted_outputs(losses, by_loss)
    group = require_graph(losses, outputs, [params])
    call = Call(losses, outputs, [Pass(group, params)], unused, create_graph)
    check_call(call, allowed)
    retain = create_graph if retain_graph is None else retain_graph
    if retain:
        refuse_donated(call, [retain])
    learned: Sequence[Tensor] = ()
    if by_loss is not None:
        learned = [w for w in by_loss if isinstance(w, Tensor) and w.requires_grad]
    if len(group) < len(outputs):  # without constants
        outputs, seeds = [outputs[i] for i in group], [seeds[i] for i in group]
    grads = runner(call, learned).grads(outputs, seeds, params.variables, retain=retain)
    return PassResult(call, [grads], values_of(losses, create_graph))


def weighted_outputs(
    losses: Losses, weights: Sequence[float | Tensor] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs that a pass for the weighted sum starts from, and their cotangents."""
    outputs = list(losses.leaves)
    seeds: list[Tensor | None] = [None] * len(outputs)  # None is one
    for index, weight in enumerate(weights or ()):
        loss = outputs[index]
        if not isinstance(weight, Tensor):
            seeds[index] = torch.full_like(loss, float(weight), requires_grad=False)
        elif weight.requires_grad:  # the gradient is to reach the weight's own parameters
            with torch.enable_grad(), INSIDE:
                outputs[index] = loss * weight.reshape(loss.shape).to(loss)
        else:
            seeds[index] = weight.detach().reshape(loss.shape).to(loss, copy=True)
    return outputs, seeds


def values_of(losses: Losses, create_graph: bool) -> PyTree:
    """Return the tree of the losses' values: the losses themselves, or detached copies."""
    values = losses.leaves if create_graph else list(map(_detached_copy, losses.leaves))
    return pytree.unflatten(losses.spec, values)


def _detached_copy(loss: Tensor) -> Tensor:
    value = detach_keep_tangent(loss)
    return value.clone() if type(loss) is Tensor else replicated(value).clone()


def run_separately(
    losses: Losses,
    params: Params,
    *,
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    strategy: str,
    chunk_size: int | None,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run the passes for every loss that carries a graph, by itself."""
    group = require_graph(losses, losses.leaves, [params])
    passes = [Pass([index], params) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph)
    _refuse_constant_losses(call, [params] * len(losses.leaves))
    check_call(call, allowed)
    if any(map(Tensor.dim, losses.leaves)):
        jacobian.refuse_nested(params)
    run = runner(call)
    batch = jacobian.choose(strategy, call)

    def differentiate(index: int, variables: list[Tensor], retain: bool) -> Grads:
        loss = losses.leaves[index]
        if index not in batch:
            return jacobian.sequential(run, loss, variables, retain=retain)
        return jacobian.batched(run, loss, variables, retain=retain, chunk_size=chunk_size)

    retain = create_graph if retain_graph is None else retain_graph
    return PassResult(call, run_in_turn(call, differentiate, retain))


def run_in_turn(
    call: Call, differentiate: Callable[[int, list[Tensor], bool], Grads], retain: bool
) -> list[Grads]:
    """Run a call's passes, one loss each, and free each part of the graph after its last pass."""
    # `differentiate` runs one: from a loss, for variables, retaining the graph or not.
    plans = None
    if not retain and len(call.passes) > 1:
        plans = plan_release(call, [edge.node for _, edge in observed_tensors()])
    kept = [retain] * len(call.passes) if plans is None else [plan.retain for plan in plans]
    if retain or len(kept) > 1:  # for a single loss of several elements, the engine says so
        refuse_donated(call, kept)
    results: list[Grads] = []
    for turn, (group, params) in enumerate(call.passes):
        variables = params.variables
        results.append(differentiate(group[0], variables, kept[turn]) if variables else [])
        if plans is not None:
            release(plans[turn].last_used)
    return results


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
    return params.unflatten(grads, copy_ties=not create_graph)


def _refuse_constant_losses(call: Call, each: Sequence[Params]) -> None:
    """Raise, under `unused="error"`, also for the params of a loss that has no pass."""
    if call.unused == "error":
        passes = [Pass([index], params) for index, params in enumerate(each)]
        refuse_unreached(replace(call, passes=passes))


def trees_by_loss(result: PassResult, params: Params, unused: str) -> PyTree:
    """Return the tree of trees of gradients; None, or zeros, for a loss without a pass."""
    losses = result.call.losses
    trees = [
        grads_to_tree(grads, params, unused, result.call.create_graph, tuple(loss.shape))
        for grads, loss in zip(result.with_constants(params).grads, losses.leaves, strict=True)
    ]
    return pytree.unflatten(losses.spec, trees)


def read_params_of_each(losses: Losses, params: PyTree) -> list[Params]:
    """Return the params that stand at the place of each loss in a tree of params."""
    return list(map(read_params, params_of_each_loss(losses, params), _roots(losses.spec)))


@lru_cache(maxsize=64)
def _roots(spec: Structure) -> list[str]:
    return pytree.paths(spec, "params")


def run_simultaneously(
    losses: Losses,
    each: Sequence[Params],
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run a pass for each loss that carries a graph, with respect to its own params."""
    group = require_graph(losses, losses.leaves, each)
    passes = [Pass([index], each[index]) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph)
    _refuse_constant_losses(call, each)
    check_call(call, allowed)
    run = runner(call)

    def differentiate(index: int, variables: list[Tensor], retain: bool) -> Grads:
        return run.grads([losses.leaves[index]], [None], variables, retain=retain)

    retain = create_graph if retain_graph is None else retain_graph
    return PassResult(call, run_in_turn(call, differentiate, retain))


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
