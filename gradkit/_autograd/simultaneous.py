"""The passes of a game: each loss is differentiated with respect to its own part of the params."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradkit._autograd.passes import PassResult, finish, run_in_turn
from gradkit._autograd.runner import PassRunner
from gradkit._checks.call import check_call
from gradkit._core import pytree
from gradkit._core.call import Call, Grads, Pass
from gradkit._core.losses import Losses, params_of_each_loss, require_graph
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree


@dataclass(frozen=True, slots=True)
class Players:
    """Losses, and for each the params that are its own."""

    losses: Losses
    params: list[Params]


def read_players(losses: Losses, params: PyTree) -> Players:
    """Return the part of a tree of params that stands at the place of each loss."""
    parts = params_of_each_loss(losses, params)
    paths = [losses.path(index).replace("losses", "params", 1) for index in range(len(parts))]
    return Players(losses, list(map(read_params, parts, paths)))


def run_players(
    players: Players, unused: str, create_graph: bool, retain_graph: bool | None
) -> PassResult:
    """Run a pass for each loss that carries a graph."""
    losses = players.losses
    group = require_graph(losses, losses.leaves)
    passes = [Pass([index], players.params[index]) for index in group]
    call = Call(losses, losses.leaves, passes, unused, create_graph)
    check_call(call)
    runner = PassRunner(call)

    def differentiate(index: int, variables: list[Tensor], retain: bool) -> Grads:
        return runner.grads([losses.leaves[index]], [None], variables, retain=retain)

    retain = create_graph if retain_graph is None else retain_graph
    return PassResult(call, run_in_turn(call, differentiate, retain))


def finish_players(result: PassResult, players: Players) -> PyTree:
    """Return the tree of gradients, of the structure of the params."""
    call = result.call
    by_loss = dict(zip(call.differentiated, result.grads, strict=True))
    trees = [
        finish(by_loss.get(i, [None] * len(part.variables)), part, call.unused, call.create_graph)
        for i, part in enumerate(players.params)
    ]
    return pytree.unflatten(players.losses.spec, trees)
