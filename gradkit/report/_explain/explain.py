"""explain: which loss reaches which parameter, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from gradkit._checks import unsupported
from gradkit._core import pytree
from gradkit._core.inference_mode import leave_inference_mode
from gradkit._core.losses import read_losses
from gradkit._core.params import Params, read_params, refuse_distributed
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError
from gradkit.report._explain.explanation import Explanation
from gradkit.report._explain.graphs import Graphs
from gradkit.report._explain.records import LossGraph, Part, Verdict
from gradkit.report._explain.verdicts import Reachability, graph_end
from gradkit.report._view.names import listed


def explain(losses: PyTree, params: PyTree) -> Explanation:
    """Return which loss reaches which parameter, why not, and what the losses share.

    The graph is read, not run: nothing is computed, freed or written. Where the other calls raise
    (a reentrant checkpoint, a module wrapped for several processes, a freed graph, a constant),
    this one says so in its result.

    Example:
        >>> import torch, gradkit
        >>> w, v = (torch.ones(2, requires_grad=True) for _ in range(2))
        >>> losses = {"fit": (w * 2).sum(), "aux": (w.detach() * v).sum()}
        >>> explanation = gradkit.report.explain(losses, {"w": w, "v": v})
        >>> verdicts = explanation.verdicts
        >>> verdicts["fit"]["w"].status, verdicts["aux"]["w"].status
        ('reached', 'not in the graph')
        >>> explanation.params["v"], explanation.losses["fit"].nodes
        (('aux',), 2)

    Args:
        losses: A tree of real floating-point tensors of any shape.
        params: As in `gradkit.value_and_grads`; a module may be wrapped for several processes.

    Returns:
        The explanation. It names losses and params by their path in the tree, `encoder.0.weight`;
        without a name they are `loss` or `loss[0]`. A None in params has no line.

    Raises:
        LeafTypeError: A leaf is no tensor that has a gradient.
        StructureError: A tree is empty.

    Source:
        The nodes and edges are those of `torch.autograd.graph.Node`,
        https://pytorch.org/docs/stable/autograd.html
    """
    with leave_inference_mode(record=True):
        wrappers = _wrappers(params)
        loss_leaves, opened = (
            read_losses(losses, scalar=False),
            read_params(params, allow_distributed=True),
        )
        names = pytree.labels(loss_leaves.spec, "loss")
        tensors = _named(opened)
        graphs = Graphs(loss_leaves.leaves)
        verdicts = _verdicts(graphs, names, tensors, [module for module, _ in wrappers])
        reached_by = _reached_by(verdicts)
        parts, entries = _parts(graphs, names, reached_by)
        loss_graphs = {
            name: _loss_graph(name, index, graphs, entries[index], opened)
            for index, name in enumerate(names)
        }
        statuses = {verdict.status for row in verdicts.values() for verdict in row.values()}
        unsupported_call = wrappers or any(graph.notes for graph in loss_graphs.values())
        fits = "reached" in statuses and "changed in place" not in statuses
        return Explanation(
            losses=loss_graphs,
            params=reached_by,
            verdicts=verdicts,
            tied=_tied(tensors),
            parts=parts,
            nodes=sum(graphs.operations.values()),
            shared=sum(count for mask, count in graphs.operations.items() if mask & mask - 1),
            notes=tuple(note for _, note in wrappers),
            suggestion=_suggestion(graphs, names) if fits and not unsupported_call else "",
        )


def _named(params: Params) -> dict[str, Tensor]:
    labels = pytree.labels(params.spec, "param")
    pairs = zip(labels, params.leaves, strict=True)
    return {label: leaf for label, leaf in pairs if leaf is not None}


def _wrappers(params: PyTree) -> list[tuple[nn.Module, str]]:
    """Return the modules that are wrapped for several processes, and what that means."""
    leaves, spec = pytree.flatten(params)
    wrappers = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module):
            try:
                refuse_distributed(leaf, partial(pytree.path, spec, index, "params"))
            except UnsupportedGraphError as error:
                text = str(error).replace(".\n  What to do: ", ". What to do: ")
                wrappers.append((leaf, text))
    return wrappers


def _verdicts(
    graphs: Graphs,
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    wrapped: Sequence[nn.Module],
) -> dict[str, dict[str, Verdict]]:
    sharded = {id(p) for module in wrapped for p in module.parameters()}
    reachability = Reachability(graphs, sharded)
    return {
        name: {param: reachability.verdict(index, tensor) for param, tensor in tensors.items()}
        for index, name in enumerate(names)
    }


def _reached_by(verdicts: dict[str, dict[str, Verdict]]) -> dict[str, tuple[str, ...]]:
    """Return for every param the losses that reach it."""
    params = next(iter(verdicts.values()))
    return {
        param: tuple(name for name, row in verdicts.items() if row[param].status == "reached")
        for param in params
    }


def _tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _loss_graph(
    name: str, index: int, graphs: Graphs, part: int | None, params: Params
) -> LossGraph:
    return LossGraph(
        nodes=graphs.count(index),
        own=graphs.operations.get(1 << index, 0),
        part=part,
        ends="" if _reaches_any(graphs, index, params) else graph_end(name, graphs, index),
        notes=_notes(graphs, index, params),
    )


def _reaches_any(graphs: Graphs, index: int, params: Params) -> bool:
    """Return whether a loss reaches a param, also a frozen one; a constant has nothing to reach."""
    leaves = graphs.leaves[index]
    return (
        not graphs.losses[index].requires_grad
        or any(id(leaf) in leaves for leaf in params.leaves)
        or any(graphs.reaches(index, variable) for variable in params.variables)
    )


def _notes(graphs: Graphs, index: int, params: Params) -> tuple[str, ...]:
    notes = [
        f"the other calls raise: expected {expected}, got {got}. What to do: {fix}"
        for expected, got, fix in unsupported.refused_nodes(graphs.kinds(index))
    ]
    if graphs.meets_released(index, params.variables):
        notes.append(
            "its graph has been freed by an earlier pass; compute all gradients in one call, or "
            "pass retain_graph=True to the earlier call"
        )
    return tuple(notes)


def _parts(
    graphs: Graphs, names: Sequence[str], reached_by: dict[str, tuple[str, ...]]
) -> tuple[tuple[Part, ...], list[int | None]]:
    """Return the parts of the graphs, and for each loss the index of the part it starts in."""
    bit = {name: 1 << index for index, name in enumerate(names)}
    params: dict[int, list[str]] = {}
    for param, losses in reached_by.items():
        params.setdefault(sum(map(bit.__getitem__, losses)), []).append(param)
    # Heads first, in the order of the losses; then by how many losses share a part.
    masks = sorted(
        (graphs.operations.keys() | params.keys()) - {0}, key=lambda mask: (mask.bit_count(), mask)
    )
    index_of = {mask: index for index, mask in enumerate(masks)}
    steps = graphs.steps()
    parts = tuple(
        Part(
            losses=tuple(name for name in names if mask & bit[name]),
            nodes=graphs.operations.get(mask, 0),
            params=tuple(params.get(mask, ())),
            below=tuple(sorted(index_of[b] for b in steps.get(mask, ()) if b in index_of)),
        )
        for mask in masks
    )
    entries = map(graphs.entry, range(len(names)))
    return parts, [None if mask is None else index_of.get(mask) for mask in entries]


def _suggestion(graphs: Graphs, names: Sequence[str]) -> str:
    shared = 0
    for mask in graphs.operations:
        shared |= mask if mask & mask - 1 else 0
    if not shared:
        return ""
    sharing = [name for index, name in enumerate(names) if shared >> index & 1]
    text = (
        f"{listed(sharing)} share part of their graphs. gradkit.per_loss_grads(losses, params) "
        "gives the gradients of each loss, one pass per loss, in one call"
    )
    if any(loss.numel() != 1 for loss in graphs.losses):
        return text
    return f"{text}; gradkit.value_and_grads(losses, params) gives those of the sum, in one pass"
