"""A public call, before it is known which engine runs its passes; and the passes of a game."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gradkit._autograd.passes import (
    PassResult,
    read_params_of_each,
    run_separately,
    run_simultaneously,
)
from gradkit._core import pytree
from gradkit._core.call import (
    Grads,
    Losses,
    Pass,
    params_of_each_loss,
    read_losses,
    read_weights,
    require_graph,
)
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import Description, Digest, RankInvariants


@dataclass(frozen=True, slots=True)
class DistributedCall:
    """The passes of a public call on this rank."""

    name: str
    losses: PyTree
    module: PyTree
    passes: Callable[..., PassResult]  # run_jointly or run_separately, with their own options
    joint: bool  # one pass for the weighted sum of all losses; else passes for each loss
    create_graph: bool
    retain: bool  # whether the graph is kept
    weights: PyTree = None
    part: Hashable = None  # the rows of the call, if it runs a few at a time
    losses_to_run: Callable[[Losses], Losses] = lambda losses: losses  # checked once more

    def read(self) -> tuple[Losses, Params]:
        """Return the losses, checked together with the weights, and the params."""
        losses = read_losses(self.losses, scalar=self.joint)
        read_weights(self.weights, losses)
        params = read_params(self.module, allow_distributed=True)
        require_graph(losses, losses.leaves, [params])
        return self.losses_to_run(losses), params

    def run(self, losses: Losses, params: Params, **options: Any) -> PassResult:
        """Run the passes: one for all losses, or for every loss, constants included."""
        options |= {"create_graph": self.create_graph, "retain": self.retain}
        result = self.passes(losses, params, unused="none", **options)
        return result if self.joint else result.with_constants(params)

    def rank_invariants(self, losses: Losses, params: Params) -> RankInvariants:
        """Return what must be the same on all ranks, by name."""
        shapes = tuple(tuple(loss.shape) for loss in losses.leaves)
        # The gradient of a sum has the same structure whatever the number of losses.
        by_loss = (("losses", losses.spec), ("the shapes of losses", shapes))
        # Gradients are sent by position: ranks must train the same parameters.
        trained = "all" if params.all_variables else tuple(params.slots)
        options = (
            ("module", params.spec),
            ("what is trained", trained),
            ("create_graph", self.create_graph),
            ("part", self.part),
        )
        return (("the call", self.name), *(() if self.joint else by_loss), *options)

    def describe(self, losses: Losses, params: Params, expected: Digest) -> Description:
        """Return what ranks compare before any runs a pass."""

        def paths() -> list[str]:
            of_losses = [] if self.joint else list(map(losses.path, range(len(losses.leaves))))
            return [*of_losses, *map(params.path, range(len(params.variables)))]

        return Description(self.rank_invariants(losses, params), (), paths, expected)

    def grad_path(self, losses: Losses, params: Params, index: int) -> str:
        """Return the path of a gradient, counted over the passes and the variables of each."""
        row, column = divmod(index, len(params.variables))
        source = "losses" if self.joint else losses.path(row)
        return f"the gradient of {source} with respect to {params.path(column)}"


def game(
    name: str, losses: PyTree, modules: PyTree, *, whole: bool, **options: Any
) -> DistributedCall:
    """Return a call whose losses each have their own part of the modules."""

    # `whole`: each pass is for all modules; else for its own part.
    def each_with_its_part(given: Losses) -> Losses:
        params_of_each_loss(read_losses(losses, scalar=True), modules)
        return given

    separately = partial(run_separately, strategy="sequential", chunk_size=None)
    options |= {"joint": False, "losses_to_run": each_with_its_part}
    run = separately if whole else _run_own_parts
    return DistributedCall(name, losses, modules, run, **options)


def _run_own_parts(losses: Losses, params: Params, **options: Any) -> PassResult:
    """Run a pass for each loss and its own part; all other params count as unreached."""
    each, columns = _own_params(losses, params)
    result = run_simultaneously(losses, each, **options)
    rows: list[Grads] = []
    for index, grads in zip(result.call.differentiated, result.grads, strict=True):
        by_column = dict(zip(columns[index], grads, strict=True))
        rows.append([by_column.get(column) for column in range(len(params.variables))])
    return _with_params(result, [params] * len(losses.leaves), rows)


def own_parts(result: PassResult, params: Params, unused: str) -> tuple[PassResult, list[Params]]:
    """Drop the gradients of each loss with respect to the others' params."""
    each, columns = _own_params(result.call.losses, params)
    own = [
        [grads[column] for column in columns[index]]
        for index, grads in zip(result.call.differentiated, result.grads, strict=True)
    ]
    result = replace(result, call=replace(result.call, unused=unused))
    return _with_params(result, each, own), each


def _with_params(result: PassResult, params: list[Params], grads: list[Grads]) -> PassResult:
    passes = [Pass([index], params[index]) for index in result.call.differentiated]
    return replace(result, call=replace(result.call, passes=passes), grads=grads)


def _own_params(losses: Losses, params: Params) -> tuple[list[Params], list[list[int]]]:
    """Return the params of each loss, and the indices of its variables among all."""
    tensors = pytree.unflatten(params.spec, params.with_variables(params.variables))
    each = read_params_of_each(losses, tensors, allow_distributed=True)
    columns = {id(variable): index for index, variable in enumerate(params.variables)}
    return each, [[columns[id(v)] for v in own.variables] for own in each]
