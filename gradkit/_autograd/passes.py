"""The passes of a call: for all losses together, for each by itself, for the players of a game."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from gradkit._autograd import batching_choice, graph_release, jacobian
from gradkit._autograd.pass_runner import PassRunner
from gradkit._checks.eager_graph import check_call, refuse_donated
from gradkit._checks.reachability import refuse_unreached
from gradkit._compat.distributed import replicated
from gradkit._compat.transforms import detach_keep_tangent
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
from gradkit._core.ownership import zeros_for
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree, Structure
from gradkit._core.results_without_graph import with_zero_derivatives

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
        by_loss = {
            one.losses[0]: grads for one, grads in zip(self.call.passes, self.grads, strict=True)
        }
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
    constants = len(group) < len(outputs)
    grads = runner(call, learned).grads(
        [outputs[index] for index in group] if constants else outputs,
        [seeds[index] for index in group] if constants else seeds,
        params.variables,
        retain=retain,
    )
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
    if unused == "error":
        every = range(len(losses.leaves))
        refuse_unreached(replace(call, passes=[Pass([index], params) for index in every]))
    check_call(call, allowed)
    if any(map(Tensor.dim, losses.leaves)):
        jacobian.refuse_nested(params)
    run = runner(call)
    batch = batching_choice.choose(strategy, call)

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
        plans = graph_release.plan_release(call, [edge.node for _, edge in observed_tensors()])
    kept = [retain] * len(call.passes) if plans is None else [plan.retain for plan in plans]
    if retain or len(kept) > 1:  # for a single loss of several elements, the engine says so
        refuse_donated(call, kept)
    results: list[Grads] = []
    for turn, (group, params) in enumerate(call.passes):
        variables = params.variables
        results.append(differentiate(group[0], variables, kept[turn]) if variables else [])
        if plans is not None:
            graph_release.release(plans[turn].last_used)
    return results


def grads_to_tree(
    grads: Grads,
    params: Params,
    unused: str,
    create_graph: bool,
    leading: tuple[int, ...] = (),
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


def trees_by_loss(result: PassResult, params: Params, unused: str) -> PyTree:
    """Return the tree of trees of gradients; None, or zeros, for a loss without a pass."""
    losses = result.call.losses
    trees = [
        grads_to_tree(grads, params, unused, result.call.create_graph, tuple(loss.shape))
        for grads, loss in zip(result.with_constants(params).grads, losses.leaves, strict=True)
    ]
    return pytree.unflatten(losses.spec, trees)


@dataclass(frozen=True, slots=True)
class Players:
    """Losses, and for each the params that are its own."""

    losses: Losses
    params: list[Params]


def read_players(losses: Losses, params: PyTree) -> Players:
    """Return the part of a tree of params that stands at the place of each loss."""
    parts = params_of_each_loss(losses, params)
    return Players(losses, list(map(read_params, parts, _roots(losses.spec))))


@lru_cache(maxsize=64)
def _roots(spec: Structure) -> list[str]:
    return pytree.paths(spec, "params")


def run_players(
    players: Players,
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    allowed: Collection[str] = (),
    runner: RunnerFactory = PassRunner,
) -> PassResult:
    """Run a pass for each loss that carries a graph."""
    losses = players.losses
    group = require_graph(losses, losses.leaves, players.params)
    passes = [Pass([index], players.params[index]) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph)
    check_call(call, allowed)
    run = runner(call)

    def differentiate(index: int, variables: list[Tensor], retain: bool) -> Grads:
        return run.grads([losses.leaves[index]], [None], variables, retain=retain)

    retain = create_graph if retain_graph is None else retain_graph
    return PassResult(call, run_in_turn(call, differentiate, retain))


def trees_by_player(result: PassResult, players: Players) -> PyTree:
    """Return the tree of gradients, of the structure of the params."""
    call = result.call
    by_loss = dict(zip(call.differentiated, result.grads, strict=True))
    trees = [
        grads_to_tree(
            by_loss.get(i, [None] * len(part.variables)), part, call.unused, call.create_graph
        )
        for i, part in enumerate(players.params)
    ]
    return pytree.unflatten(players.losses.spec, trees)
