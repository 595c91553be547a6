"""The way of an eager call: run the passes, fill in what was not reached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradkit._autograd import engine, graph_release, jacobian
from gradkit._autograd.engine import Run
from gradkit._checks.call import Grads, Plan, prepare, refuse_unreached
from gradkit._core import pytree
from gradkit._core.inputs import Losses, Params, read_weights, require_graph
from gradkit._core.options import STRATEGIES, UNUSED, check_chunk_size, check_option
from gradkit._core.ownership import zeros_for
from gradkit._core.pytree import PyTree


def ordinary_mode() -> AbstractContextManager[object]:
    """Leave inference mode: a gradient made in it could not take part in autograd later [E6]."""
    return _left_inference_mode() if torch.is_inference_mode_enabled() else _NOTHING_TO_LEAVE


_NOTHING_TO_LEAVE = nullcontext()


@contextmanager
def _left_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def weigh(
    losses: Losses, weights: Sequence[float | Tensor] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return where a pass for the weighted sum starts, and the cotangents it starts with.

    Args:
        losses: The losses.
        weights: One for each, or None for ones.

    Returns:
        One output for each loss, and one seed, where None is one. A weight that requires grad is
        multiplied into its output, so that the gradient reaches the weight's own parameters.
    """
    outputs = list(losses.leaves)
    seeds: list[Tensor | None] = [None] * len(outputs)
    for index, weight in enumerate(weights or ()):
        loss = outputs[index]
        if not isinstance(weight, Tensor):
            seeds[index] = torch.full_like(loss, float(weight), requires_grad=False)
        elif weight.requires_grad:
            with torch.enable_grad():
                outputs[index] = loss * weight.reshape(loss.shape).to(loss)
        else:
            seeds[index] = torch.empty_like(loss, requires_grad=False).copy_(
                weight.reshape(loss.shape)
            )
    return outputs, seeds


@dataclass(frozen=True, slots=True)
class PassResult:
    """What the passes of a call brought.

    Attributes:
        target: The losses.
        plan: The passes.
        grads: For each pass, one gradient for each variable.
        values: The values of the losses, a tree like them, if they were asked for.
    """

    target: Losses
    plan: Plan
    grads: list[Grads]
    values: PyTree = None

    def with_constants(self, wanted: Params) -> PassResult:
        """Return the same with a pass for every loss, those of constants having brought nothing."""
        by_loss = {group[0]: grads for (group, _), grads in zip(self.plan, self.grads, strict=True)}
        every = range(len(self.target.leaves))
        nothing: Grads = [None] * len(wanted.variables)
        grads = [list(by_loss.get(index, nothing)) for index in every]
        return replace(self, plan=[([index], wanted) for index in every], grads=grads)


def run_jointly(
    target: Losses,
    wanted: Params,
    weights: PyTree,
    *,
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    allowed: Collection[str] = (),
    run_as: Callable[[Run], Run] = lambda run: run,
) -> PassResult:
    """Run one pass for the weighted sum of the losses.

    Args:
        target: The losses.
        wanted: The params.
        weights: The caller's tree.
        unused: The caller's option.
        create_graph: The caller's option.
        retain_graph: The caller's option.
        allowed: Nodes that are refused otherwise, as the caller sees to them.
        run_as: Makes another run of what is prepared.

    Returns:
        The pass, and the values of all losses.
    """
    by_loss = read_weights(weights, target)
    outputs, seeds = weigh(target, by_loss)
    live = require_graph(target, outputs)
    plan = [(live, wanted)]
    run = run_as(prepare(target, outputs, plan, create_graph, unused, allowed))
    learned = [w for w in by_loss or () if isinstance(w, Tensor) and w.requires_grad]
    if learned:
        run = replace(run, weights=learned)
    grads = run.grads(
        [outputs[index] for index in live],
        [seeds[index] for index in live],
        wanted.variables,
        retain=create_graph if retain_graph is None else retain_graph,
    )
    values = [loss if create_graph else loss.detach().clone() for loss in target.leaves]
    return PassResult(target, plan, [grads], pytree.unflatten(target.spec, values))


def run_separately(
    target: Losses,
    wanted: Params,
    *,
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    strategy: str,
    chunk_size: int | None,
    allowed: Collection[str] = (),
    run_as: Callable[[Run], Run] = lambda run: run,
) -> PassResult:
    """Run the passes for every loss by itself.

    Args:
        target: The losses.
        wanted: The params.
        unused: The caller's option.
        create_graph: The caller's option.
        retain_graph: The caller's option.
        strategy: The caller's option.
        chunk_size: The caller's option.
        allowed: Nodes that are refused otherwise, as the caller sees to them.
        run_as: Makes another run of what is prepared.

    Returns:
        A pass for each loss that carries a graph.
    """
    live = require_graph(target, target.leaves)
    plan = [([index], wanted) for index in live]
    if unused == "error":
        refuse_unreached(target, target.leaves, [([i], wanted) for i in range(len(target.leaves))])
    run = run_as(prepare(target, target.leaves, plan, create_graph, unused, allowed))
    batch = jacobian.choose(strategy, [target.leaves[i] for i in live], wanted.variables)

    def differentiate(loss: Tensor, variables: list[Tensor], keep: bool) -> Grads:
        if id(loss) in batch:
            return jacobian.batched(run, loss, variables, retain=keep, chunk_size=chunk_size)
        return jacobian.sequential(run, loss, variables, retain=keep)

    retain = create_graph if retain_graph is None else retain_graph
    return PassResult(target, plan, run_in_turn(target, plan, differentiate, retain))


def check_separate_options(unused: str, strategy: str, chunk_size: int | None) -> None:
    """Refuse values that the options of per-loss gradients do not have.

    Args:
        unused: The caller's option.
        strategy: The caller's option.
        chunk_size: The caller's option.

    Raises:
        OptionError: One of them is none.
    """
    check_option("unused", unused, UNUSED)
    check_option("strategy", strategy, STRATEGIES)
    check_chunk_size(chunk_size)


def finish_separate(found: PassResult, wanted: Params, unused: str, create_graph: bool) -> PyTree:
    """Return the tree of trees of gradients; None, or zeros, for a loss without a pass.

    Args:
        found: What the passes brought.
        wanted: The params.
        unused: The caller's option.
        create_graph: The caller's option.

    Returns:
        A tree like the losses, of trees like the params.
    """
    trees = [
        finish(grads, wanted, unused, create_graph, tuple(loss.shape))
        for grads, loss in zip(found.with_constants(wanted).grads, found.target.leaves, strict=True)
    ]
    return pytree.unflatten(found.target.spec, trees)


def run_in_turn(
    losses: Losses,
    plan: Plan,
    differentiate: Callable[[Tensor, list[Tensor], bool], Grads],
    retain: bool,
) -> list[Grads]:
    """Run the passes of a plan, one loss each, and let go of the graph as they go.

    Args:
        losses: The losses.
        plan: The passes.
        differentiate: Runs one: from the loss, for the variables, keeping the graph or not.
        retain: Keep all of the graph.

    Returns:
        What each pass brought.
    """
    roots = [losses.leaves[group[0]] for group, _ in plan]
    variables = [params.variables for _, params in plan]
    owed = None
    if not retain and len(plan) > 1:
        further = [edge.node for _, edge in engine.watched()]
        needs = [
            wanted if root.numel() else [] for root, wanted in zip(roots, variables, strict=True)
        ]
        owed = graph_release.shares(roots, variables if all(needs) else needs, further)
    found: list[Grads] = []
    for turn, (root, wanted) in enumerate(zip(roots, variables, strict=True)):
        keep = retain if owed is None else owed[turn].retain
        found.append(differentiate(root, wanted, keep) if wanted else [])
        if owed is not None:
            graph_release.release(owed[turn].own)
    return found


def finish(
    grads: Grads,
    params: Params,
    unused: str,
    create_graph: bool,
    leading: tuple[int, ...] = (),
) -> PyTree:
    """Return the tree of gradients, with zeros for what was not reached, if that is asked for.

    Args:
        grads: One for each variable.
        params: The params.
        unused: The caller's option.
        create_graph: The caller's option.
        leading: The shape of the loss, in front of every gradient.

    Returns:
        A tree like the params.
    """
    if unused == "zeros":
        grads = [
            zeros_for(variable, leading) if grad is None else grad
            for grad, variable in zip(grads, params.variables, strict=True)
        ]
    return params.unflatten(grads, copy_ties=not create_graph)
