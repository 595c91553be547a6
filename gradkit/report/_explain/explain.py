"""explain: which loss reaches which parameter, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from gradkit._checks import unsupported
from gradkit._compat.transforms import ordinary_mode
from gradkit._core import graph, pytree
from gradkit._core.inputs import Params, read_losses, read_params, refuse_distributed
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError
from gradkit.report._explain.explanation import Explanation
from gradkit.report._explain.graphs import Graphs, walk
from gradkit.report._explain.records import LossGraph, Part, Verdict
from gradkit.report._explain.verdicts import Reachability, where_it_ends
from gradkit.report._view.names import listed


def explain(losses: PyTree, params: PyTree) -> Explanation:
    """Return which loss reaches which parameter, why not, and what the losses share.

    The graph is read, not run: nothing is computed, freed or written. What the other calls refuse
    (a reentrant checkpoint, a module wrapped for several processes, a freed graph, a constant) is
    told here.

    Example:
        >>> import torch, gradkit
        >>> w, v = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> losses = {"fit": (w * 2).sum(), "aux": (w.detach() * v).sum()}
        >>> found = gradkit.report.explain(losses, {"w": w, "v": v})
        >>> found.verdicts["fit"]["w"].status, found.verdicts["aux"]["w"].status
        ('reached', 'not in the graph')
        >>> found.params["v"], found.losses["fit"].nodes
        (('aux',), 2)

    Args:
        losses: A tree of real floating-point tensors of any shape.
        params: As in `gradkit.value_and_grads`; a module may be wrapped for several processes.

    Returns:
        The explanation. It names losses and params by their place in the tree, `encoder.0.weight`;
        what has no name is `loss` or `loss[0]`. A None in params has no line.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient.
        StructureError: A tree is empty.

    Source:
        The nodes and edges are those of `torch.autograd.graph.Node`,
        https://pytorch.org/docs/stable/autograd.html
    """
    with ordinary_mode():
        wrappers = _wrappers(params)
        target, wanted = read_losses(losses, scalar=False), read_params(params, wrapped=True)
        names = pytree.labels(target.spec, "loss")
        places = dict(zip(pytree.labels(wanted.spec, "param"), wanted.leaves, strict=True))
        graphs = walk(target.leaves)
        judge = Reachability(graphs, {id(p) for module, _ in wrappers for p in module.parameters()})
        verdicts = {
            name: {
                param: judge.verdict(index, tensor)
                for param, tensor in places.items()
                if tensor is not None
            }
            for index, name in enumerate(names)
        }
        reached = _reached(verdicts)
        parts, entries = _parts(graphs, names, reached)
        described = {
            name: _loss_graph(name, index, graphs, entries[index], wanted)
            for index, name in enumerate(names)
        }
        statuses = {one.status for by_param in verdicts.values() for one in by_param.values()}
        refused = wrappers or any(graph.notes for graph in described.values())
        fits = "reached" in statuses and "changed in place" not in statuses and not refused
        return Explanation(
            losses=described,
            params=reached,
            verdicts=verdicts,
            tied=_tied(places),
            parts=parts,
            nodes=sum(graphs.operations.values()),
            shared=sum(count for losses, count in graphs.operations.items() if losses & losses - 1),
            notes=tuple(note for _, note in wrappers),
            suggestion=_suggestion(graphs, names) if fits else "",
        )


def _reached(verdicts: dict[str, dict[str, Verdict]]) -> dict[str, tuple[str, ...]]:
    """Return for every param the losses that reach it."""
    params = next(iter(verdicts.values()))
    return {
        param: tuple(
            name for name, by_param in verdicts.items() if by_param[param].status == "reached"
        )
        for param in params
    }


def _loss_graph(
    name: str, index: int, graphs: Graphs, part: int | None, wanted: Params
) -> LossGraph:
    return LossGraph(
        nodes=graphs.count(index),
        own=graphs.operations.get(1 << index, 0),
        part=part,
        ends=_ends(name, graphs, index, wanted),
        notes=_notes(graphs, index, wanted),
    )


def _wrappers(params: PyTree) -> list[tuple[nn.Module, str]]:
    """Return the modules that are wrapped for several processes, and what that means."""
    leaves, spec = pytree.flatten(params)
    found = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            try:
                refuse_distributed(leaf, partial(pytree.path, spec, index, "params"))
            except UnsupportedGraphError as error:
                found.append((leaf, _one_line(error)))
    return found


def _one_line(error: Exception) -> str:
    return str(error).replace(".\n  What to do: ", ". What to do: ")


def _tied(places: dict[str, Tensor | None]) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in places.items():
        if tensor is not None:
            names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _ends(name: str, graphs: Graphs, index: int, wanted: Params) -> str:
    leaves = graphs.leaves[index]
    if not graphs.losses[index].requires_grad or any(id(leaf) in leaves for leaf in wanted.leaves):
        return ""
    if any(graphs.reaches(index, variable) for variable in wanted.variables):
        return ""
    return where_it_ends(name, graphs, index)


def _notes(graphs: Graphs, index: int, wanted: Params) -> tuple[str, ...]:
    notes = [
        f"the other calls refuse it: expected {expected}, got {got}. What to do: {do}"
        for expected, got, do in unsupported.hazards(graphs.kinds(index))
    ]
    if graphs.would_meet_freed(index, wanted.variables):
        notes.append(
            "its graph has been freed by an earlier pass; compute all gradients in one call, or "
            "pass retain_graph=True to the earlier one"
        )
    return tuple(notes)


def _parts(
    graphs: Graphs, names: Sequence[str], reached: dict[str, tuple[str, ...]]
) -> tuple[tuple[Part, ...], list[int | None]]:
    """Return the parts of the graphs, and for each loss the place of the one that it starts in."""
    bit = {name: 1 << index for index, name in enumerate(names)}
    params: dict[int, list[str]] = {}
    for param, losses in reached.items():
        params.setdefault(sum(map(bit.__getitem__, losses)), []).append(param)
    kinds = (graphs.operations.keys() | params.keys()) - {0}
    # Heads first, in the order of the losses; then by how many losses share a part.
    order = sorted(kinds, key=lambda losses: (losses.bit_count(), losses))
    place = {losses: index for index, losses in enumerate(order)}
    steps = graphs.steps()
    parts = tuple(
        Part(
            losses=tuple(name for name in names if losses & bit[name]),
            nodes=graphs.operations.get(losses, 0),
            params=tuple(params.get(losses, ())),
            below=tuple(sorted(place[b] for b in steps.get(losses, ()) if b in place)),
        )
        for losses in order
    )
    return parts, [_entry(loss, graphs, place.get) for loss in graphs.losses]


def _entry(loss: Tensor, graphs: Graphs, place: Callable[[int], int | None]) -> int | None:
    return place(graphs.reached_by[graph.edge(loss).node]) if loss.requires_grad else None


def _suggestion(graphs: Graphs, names: Sequence[str]) -> str:
    sharing = [losses for losses in graphs.operations if losses & losses - 1]
    if not sharing:
        return ""
    bits = 0
    for losses in sharing:
        bits |= losses
    together = [name for index, name in enumerate(names) if bits >> index & 1]
    told = (
        f"{listed(together)} have part of their graphs in common. gradkit.per_loss_grads(losses, "
        "params) gives the gradients of each by itself, a pass each, in one call"
    )
    if any(loss.numel() != 1 for loss in graphs.losses):
        return told
    return f"{told}; gradkit.value_and_grads(losses, params) those of their sum, from one pass"
