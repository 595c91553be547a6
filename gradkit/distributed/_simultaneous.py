"""The passes of a game: each loss with respect to its own part of a tree of modules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gradkit._autograd.passes import PassResult, Players, RunnerFactory, read_players, run_players
from gradkit._core import pytree
from gradkit._core.call import Grads, Losses, Pass, params_of_each_loss, read_losses
from gradkit._core.params import Params
from gradkit.distributed._distributed_call import DistributedCall


@dataclass(frozen=True, slots=True)
class SimultaneousCall(DistributedCall):
    """A call whose losses each have their own part of the modules."""

    def read(self) -> tuple[Losses, Params]:
        """Return the losses, checked together with the tree of modules, and all params."""
        losses, params = DistributedCall.read(self)
        params_of_each_loss(read_losses(self.losses, scalar=True), self.module)
        return losses, params


def run(
    losses: Losses,
    params: Params,
    *,
    unused: str,
    create_graph: bool,
    retain_graph: bool | None,
    allowed: Collection[str],
    runner: RunnerFactory,
) -> PassResult:
    """Run a pass for each loss and its own part; all other params count as unreached."""
    players, columns = _parts(losses, params)
    result = run_players(players, unused, create_graph, retain_graph, allowed, runner)
    rows: list[Grads] = []
    for index, grads in zip(result.call.differentiated, result.grads, strict=True):
        row: Grads = [None] * len(params.variables)
        for column, grad in zip(columns[index], grads, strict=True):
            row[column] = grad
        rows.append(row)
    return _with_params(result, [params] * len(losses.leaves), rows)


def own_parts(result: PassResult, params: Params, unused: str) -> tuple[PassResult, Players]:
    """Return of the gradients of each loss those of its own part."""
    players, columns = _parts(result.call.losses, params)
    own = [
        [grads[column] for column in columns[index]]
        for index, grads in zip(result.call.differentiated, result.grads, strict=True)
    ]
    result = replace(result, call=replace(result.call, unused=unused))
    return _with_params(result, players.params, own), players


def _with_params(result: PassResult, params: list[Params], grads: list[Grads]) -> PassResult:
    passes = [Pass([index], params[index]) for index in result.call.differentiated]
    return replace(result, call=replace(result.call, passes=passes), grads=grads)


def _parts(losses: Losses, params: Params) -> tuple[Players, list[list[int]]]:
    """Return the part of each loss, and the indices of its variables among all."""
    tensors = pytree.unflatten(params.spec, params.with_variables(params.variables))
    players = read_players(losses, tensors)
    columns = {id(variable): index for index, variable in enumerate(params.variables)}
    return players, [[columns[id(v)] for v in part.variables] for part in players.params]
