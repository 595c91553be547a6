"""explain: which loss reaches which parameter, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial, reduce
from operator import or_

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradkit._checks.eager_graph import refusal_reasons
from gradkit._checks.modified_tensors import modified_since_saved
from gradkit._compat.nodes import has_released
from gradkit._core import pytree
from gradkit._core.call import read_losses
from gradkit._core.graph import Subgraph, edge, is_leaf_node
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.params import Params, read_params, refuse_distributed
from gradkit._core.pytree import PyTree
from gradkit.errors import UnsupportedGraphError, describe
from gradkit.report.explanation import Explanation, LossGraph, Part, Reachability
from gradkit.report.tables import listed


def explain(losses: PyTree, params: PyTree) -> Explanation:
    """Return which loss reaches which parameter, why not, and what the losses share.

    The graph is read, not run: nothing is computed, freed or written. Where the other calls raise
    (a reentrant checkpoint, a module wrapped for several processes, a freed graph, a saved tensor
    that was changed in place, a constant), this one says so in its result. What torch has dropped
    from the graph, it cannot show: compute the losses inside `gradkit.checked()`, which names it.

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
        read = read_losses(losses, scalar=False)
        opened = read_params(params, allow_distributed=True)
        names = pytree.labels(read.spec, "loss")
        labels = zip(pytree.labels(opened.spec, "param"), opened.leaves, strict=True)
        tensors = {label: leaf for label, leaf in labels if leaf is not None}
        graphs = _Graphs(read.leaves)
        sharded = {id(p) for module, _ in wrappers for p in module.parameters()}
        verdicts = {}
        for name, graph in zip(names, graphs.each, strict=True):
            reachability = Reachability(graph, sharded)
            verdicts[name] = {label: reachability.verdict(t) for label, t in tensors.items()}
        reached_by = {
            label: tuple(name for name in names if verdicts[name][label].status == "reached")
            for label in tensors
        }
        parts, first_parts = _parts(graphs, names, reached_by)
        loss_graphs = {
            name: _loss_graph(name, index, graphs, part, opened)
            for index, (name, part) in enumerate(zip(names, first_parts, strict=True))
        }
        is_refused = bool(wrappers) or any(graph.notes for graph in loss_graphs.values())
        statuses = {verdict.status for row in verdicts.values() for verdict in row.values()}
        fits = "reached" in statuses and "changed in place" not in statuses and not is_refused
        return Explanation(
            losses=loss_graphs,
            params=reached_by,
            verdicts=verdicts,
            tied=_tied(tensors),
            parts=parts,
            nodes=sum(graphs.operations.values()),
            shared=sum(count for mask, count in graphs.operations.items() if mask & mask - 1),
            notes=tuple(note for _, note in wrappers),
            suggestion=_suggestion(graphs, names) if fits else "",
        )


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


def _tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _loss_graph(
    name: str, index: int, graphs: _Graphs, part: int | None, params: Params
) -> LossGraph:
    graph, bit = graphs.each[index], 1 << index
    changed = modified_since_saved(graph.leading_to(params.variables))
    notes = [
        f"the other calls raise: expected {expected}, got {got}. What to do: {fix}"
        for expected, got, fix in (*refusal_reasons(graph.kinds), *([changed] if changed else []))
    ]
    if graphs.meets_released(graph, params.variables):
        notes.append(
            "its graph has been freed by an earlier pass; compute all gradients in one call, or "
            "pass retain_graph=True to the earlier call"
        )
    return LossGraph(
        nodes=sum(count for mask, count in graphs.operations.items() if mask & bit),
        own=graphs.operations[bit],
        part=part,
        ends=_end(name, graph, params),
        notes=tuple(notes),
    )


def _end(name: str, graph: Subgraph, params: Params) -> str:
    """Return where the graph of a loss ends, if it reaches none of the params, or else nothing."""
    # A frozen param counts as reached; a constant has nothing to reach.
    has_leaf = any(id(leaf) in graph.leaves for leaf in params.leaves)
    if not graph.roots or has_leaf or any(map(graph.reaches, params.variables)):
        return ""
    text = f"The graph of {name!r} ends before any parameter"
    leaves = list(graph.leaves.values())
    if not leaves:
        return f"{text}."
    more = f" and {len(leaves) - 3} more" if len(leaves) > 3 else ""
    shown = ", ".join(map(describe, leaves[:3]))
    return f"{text}, at leaf tensors that are not in params: {shown}{more}."


def _parts(
    graphs: _Graphs, names: Sequence[str], reached_by: dict[str, tuple[str, ...]]
) -> tuple[tuple[Part, ...], list[int | None]]:
    """Return the parts of the graphs, and for each loss the index of the part it starts in."""
    bit = {name: 1 << index for index, name in enumerate(names)}
    params: dict[int, list[str]] = {}
    for param, losses in reached_by.items():
        params.setdefault(sum(bit[name] for name in losses), []).append(param)
    masks = (graphs.operations.keys() | params.keys()) - {0}
    # Heads first, in the order of the losses; then by how many losses share a part.
    order = sorted(masks, key=lambda mask: (mask.bit_count(), mask))
    index_of = {mask: index for index, mask in enumerate(order)}
    below = graphs.leads_to()
    parts = tuple(
        Part(
            losses=_members(mask, names),
            nodes=graphs.operations[mask],
            params=tuple(params.get(mask, ())),
            below=tuple(sorted(index_of[b] for b in below.get(mask, ()) if b in index_of)),
        )
        for mask in order
    )
    entries = map(graphs.entry, graphs.losses)
    return parts, [None if mask is None else index_of.get(mask) for mask in entries]


def _members(mask: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for index, name in enumerate(names) if mask >> index & 1)


def _suggestion(graphs: _Graphs, names: Sequence[str]) -> str:
    shared = reduce(or_, (mask for mask in graphs.operations if mask & mask - 1), 0)
    if not shared:
        return ""
    text = (
        f"{listed(_members(shared, names))} share part of their graphs. "
        "gradkit.per_loss_grads(losses, params) gives the gradients of each loss, one pass per "
        "loss, in one call"
    )
    if any(loss.numel() != 1 for loss in graphs.losses):
        return text
    return f"{text}; gradkit.value_and_grads(losses, params) gives those of the sum, in one pass"


class _Graphs:
    """The graph of each loss, empty for a constant; sets of losses are masks."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self.losses = losses
        self.each = [Subgraph([loss]) for loss in losses]

    @cached_property
    def reached_by(self) -> dict[Node, int]:
        """The losses that reach each node."""
        masks: Counter[Node] = Counter()
        for index, graph in enumerate(self.each):
            for node in graph.nodes:
                masks[node] |= 1 << index
        return masks

    @cached_property
    def operations(self) -> Counter[int]:
        """For each set of losses, the number of nodes that exactly these reach."""
        reached = self.reached_by.items()
        return Counter(mask for node, mask in reached if not is_leaf_node(node))

    def entry(self, loss: Tensor) -> int | None:
        """Return the losses that reach the node in which a loss starts; None for a constant."""
        return self.reached_by[edge(loss).node] if loss.requires_grad else None

    def leads_to(self) -> dict[int, set[int]]:
        """Return, for each set of losses, the sets into whose nodes its nodes lead."""
        below: dict[int, set[int]] = {}
        for node, mask in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != mask:
                    below.setdefault(mask, set()).add(self.reached_by[child])
        return below

    @cached_property
    def _released(self) -> set[Node]:
        """The nodes that an earlier pass has freed."""
        return set(filter(has_released, self.reached_by))

    def meets_released(self, graph: Subgraph, variables: Sequence[Tensor]) -> bool:
        """Return whether a pass through a graph to some tensors would execute a freed node."""
        if self._released.isdisjoint(graph.nodes):
            return False
        return not self._released.isdisjoint(graph.leading_to(variables))
