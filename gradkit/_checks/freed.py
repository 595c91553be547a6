"""Graphs that an earlier pass has freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradkit._core import saved_tensors
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph
from gradkit._core.losses import Losses
from gradkit._core.params import Params
from gradkit.errors import FreedGraphError, message


def refuse_freed(call: Call, *, thorough: bool) -> None:
    """Raise if a pass would execute a freed node: any such, or one next to a loss.

    What is freed deeper down shows when a single pass gets there; looking at every node would take
    as long as a small pass.
    """
    if thorough and not _any_freed(call):
        return
    for group, params in call.passes:
        for index in group:
            root = call.outputs[index]
            if (thorough or saved_tensors.is_freed(root)) and _executes_freed(
                call.graph.below([index]), params
            ):
                raise FreedGraphError(freed(call.losses, [index]))


def _any_freed(call: Call) -> bool:
    """Return whether a pass would execute a freed node, looking once at passes for one params."""
    groups: dict[int, tuple[Params, list[int]]] = {}
    for group, params in call.passes:
        groups.setdefault(id(params), (params, []))[1].extend(group)
    views = [(call.graph.below(group), params) for params, group in groups.values()]
    return any(_executes_freed(below, params) for below, params in views)


def _executes_freed(below: Subgraph, params: Params) -> bool:
    return any(map(saved_tensors.has_released, below.leading_to(params.variables)))


def refuse_freed_root(call: Call, index: int) -> None:
    """Raise if a loss has been differentiated before."""
    if saved_tensors.is_freed(call.outputs[index]):
        raise FreedGraphError(freed(call.losses, [index]))


def freed(losses: Losses, indices: Iterable[int]) -> str:
    """Return the message for a second pass through the graph of some losses."""
    return message(
        ", ".join(map(losses.path, indices)),
        "a graph that still holds its saved tensors",
        "one that an earlier backward() or gradkit call has freed",
        "ask for all gradients in one call, gradkit.per_loss_grads({'a': loss_a, 'b': loss_b}, "
        "params), or pass retain_graph=True to the earlier call",
    )


def losses_freed(losses: Losses) -> Sequence[int]:
    """Return the losses whose graphs hold a freed node; all of them if none is known to."""
    every = range(len(losses.leaves))
    nodes = {index: Subgraph([losses.leaves[index]]).nodes for index in every}
    freed_losses = [index for index in every if any(map(saved_tensors.has_released, nodes[index]))]
    return freed_losses or every
