"""explain: which loss reaches which parameter, and why not, as far as the graph shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradkit._checks.eager_graph import refusal_reasons
from gradkit._checks.modified_tensors import modified_since_saved
from gradkit._checks.reachability import is_fsdp_shard
from gradkit._compat.autograd import without_torch_function
from gradkit._compat.nodes import any_released, names_by_kind, packed_tensors
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.call import read_losses
from gradkit._core.graph import (
    Subgraph,
    edge,
    has_rebuilt_history,
    is_leaf_node,
    was_used_before_change,
)
from gradkit._core.ownership import PLAIN_TYPES, leave_inference_mode
from gradkit._core.params import Params, read_params, refuse_distributed
from gradkit._core.pytree import PyTree
from gradkit._core.tables import Block, Report, Table, folded, listed, plural, styled
from gradkit._core.user_code import captured_by
from gradkit.errors import UnsupportedGraphError, describe
from gradkit.report.charts import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Status: TypeAlias = Literal[
    "reached", "frozen", "constant loss", "not in the graph", "reentrant checkpoint", "sharded",
    "moved", "changed in place", "made in inference mode", "detached",
]  # fmt: skip
_STYLES = {"reached": "green", "frozen": "dim", "constant loss": "dim", "not in the graph": "dim"}
_MAX_COLUMNS = 8


@dataclass(frozen=True)
class Verdict:
    """Whether a gradient of one loss arrives at one parameter.

    Attributes:
        status: `"reached"`, or why not: `"frozen"`, `"constant loss"`, `"not in the graph"`,
            `"reentrant checkpoint"`, `"sharded"`, `"moved"` (moved or cast since) or
            `"changed in place"`, `"made in inference mode"`, `"detached"` (used as a constant).
        why: The reason in a sentence; empty if it is reached.
    """

    status: Status
    why: str = ""


@dataclass(frozen=True)
class LossGraph:
    """The graph of one loss.

    Attributes:
        nodes: The number of its nodes. Those that accumulate into leaf tensors are not counted.
        own: The number of nodes that belong to this loss's graph alone.
        part: The index, in `parts`, of the part that it starts in; None for a constant.
        ends: Where its graph ends, if it reaches none of the params; else empty.
        notes: What prevents its differentiation, a sentence each.
    """

    nodes: int
    own: int
    part: int | None
    ends: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A part of the graphs: the nodes that exactly these losses reach. One loss: its head.

    Attributes:
        losses: The names of the losses.
        nodes: The number of nodes.
        params: The params that exactly these losses reach.
        below: The indices of the parts that it leads into.
    """

    losses: tuple[str, ...]
    nodes: int
    params: tuple[str, ...]
    below: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Explanation(Report):
    """Which loss reaches which parameter, and why not.

    Attributes:
        losses: The graph of each loss.
        params: For each parameter the losses that reach it.
        verdicts: `verdicts[loss][param]`.
        tied: The names of parameters that are one tensor; a tuple for each such tensor.
        parts: The parts of the graphs, those of single losses first.
        nodes: The number of nodes of all graphs together.
        shared: How many of them are in the graph of more than one loss.
        notes: What concerns all params, a sentence each.
        suggestion: Which call fits losses that share part of their graphs; empty if none do, or if
            every call would raise.
    """

    losses: dict[str, LossGraph]
    params: dict[str, tuple[str, ...]]
    verdicts: dict[str, dict[str, Verdict]]
    tied: tuple[tuple[str, ...], ...]
    parts: tuple[Part, ...]
    nodes: int
    shared: int
    notes: tuple[str, ...] = ()
    suggestion: str = ""

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw losses, parts of graphs and their params on `ax` of matplotlib or a new figure."""
        return draw(self, ax)

    def _blocks(self) -> Sequence[Block]:
        return [
            f"{plural(len(self.losses), 'loss')}, {plural(len(self.params), 'param')}: "
            f"{plural(self.nodes, 'graph node')}, {self.shared:,} of them shared by several losses",
            self._loss_table(),
            *self._reach_tables(),
            *(f"{loss}: {note}." for loss, graph in self.losses.items() for note in graph.notes),
            *(graph.ends for graph in self.losses.values() if graph.ends),
            *self._reasons(),
            *(f"One tensor: {' = '.join(names)}." for names in self.tied),
            *self.notes,
            *([f"Suggestion: {self.suggestion}."] if self.suggestion else []),
        ]

    def _loss_table(self) -> Table:
        rows = []
        for name, graph in self.losses.items():
            reached = sum(v.status == "reached" for v in self.verdicts[name].values())
            counts = (graph.nodes, graph.own, graph.nodes - graph.own, reached)
            rows.append([name, *(f"{count:,}" for count in counts)])
        return Table(["loss", "nodes", "own", "shared", "reaches"], rows)

    def _reach_tables(self) -> list[Table]:
        losses, rows = list(self.losses), self.verdicts.values()
        groups = folded({name: tuple(row[name] for row in rows) for name in self.params})
        tables = []
        for start in range(0, len(losses), _MAX_COLUMNS):
            columns = slice(start, start + _MAX_COLUMNS)
            cells = [[label, str(len(n)), *map(_cell, kind[columns])] for label, n, kind in groups]
            tables.append(Table(["param", "count", *losses[columns]], cells))
        return tables

    def _reasons(self) -> list[str]:
        losses: dict[Verdict, dict[str, list[str]]] = {}
        for loss, row in self.verdicts.items():
            for param, verdict in row.items():
                if verdict.why:
                    losses.setdefault(verdict, {}).setdefault(param, []).append(loss)
        statuses = [verdict.status for verdict in losses]
        return [
            # The table shows which params a status concerns if that has only one reason.
            (v.status if statuses.count(v.status) == 1 else f"{v.status} ({self._where(by_param)})")
            + f": {v.why}."
            for v, by_param in losses.items()
        ]

    def _where(self, losses: dict[str, list[str]]) -> str:
        """Name params, and their losses where those are not all."""
        groups = folded({name: tuple(losses.get(name, ())) for name in self.params})
        return listed([
            label if len(some) == len(self.losses) else f"{label} for {listed(some)}"
            for label, _, some in groups
            if some
        ])


def _cell(verdict: Verdict) -> str:
    return styled(verdict.status, _STYLES.get(verdict.status, "red"))


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
        ('reached', 'detached')
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
        places: dict[int, list[str]] = {}
        for label, tensor in tensors.items():
            places.setdefault(id(tensor), []).append(label)
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
            tied=tuple(tuple(group) for group in places.values() if len(group) > 1),
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


def _loss_graph(
    name: str, index: int, graphs: _Graphs, part: int | None, params: Params
) -> LossGraph:
    graph, bit = graphs.each[index], 1 << index
    executed = graph.leading_to(params.variables)
    changed = modified_since_saved(executed)
    notes = [
        f"the other calls raise: expected {expected}, got {got}. What to do: {fix}"
        for expected, got, fix in (*refusal_reasons(graph.kinds), *([changed] if changed else []))
    ]
    if any_released(executed, names_by_kind(graph.kinds)):
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
    # No part has the mask 0, which stands for a constant.
    starts = [graphs.reached_by[edge(x).node] if x.requires_grad else 0 for x in graphs.losses]
    return parts, [index_of.get(mask) for mask in starts]


def _members(mask: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for index, name in enumerate(names) if mask >> index & 1)


def _suggestion(graphs: _Graphs, names: Sequence[str]) -> str:
    sharing = {n for m in graphs.operations if m & m - 1 for n in _members(m, names)}
    if not sharing:
        return ""
    text = (
        f"{listed(sorted(sharing, key=names.index))} share part of their graphs. "
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

    def leads_to(self) -> dict[int, set[int]]:
        """Return, for each set of losses, the sets into whose nodes its nodes lead."""
        below: dict[int, set[int]] = {}
        for node, mask in self.reached_by.items():
            for child, _ in node.next_functions:
                if child is not None and self.reached_by[child] != mask:
                    below.setdefault(mask, set()).add(self.reached_by[child])
        return below


_CHECKPOINT = "CheckpointFunctionBackward"

_REACHED = Verdict("reached")
_FROZEN = Verdict("frozen", "requires_grad is False")
_FROZEN_SINCE = Verdict("frozen", "requires_grad has been set to False since the loss was computed")
_INTEGER = Verdict("frozen", "its dtype is not floating-point, and has no gradient")
_CONSTANT = Verdict(
    "constant loss",
    "the loss carries no graph: made under no_grad or inference_mode, detached, from inputs none "
    "of which requires grad, by a checkpoint with use_reentrant=True of such inputs, or by an "
    "operation that drops the graph (gradkit.checked() around the forward pass names it)",
)
_SHARDED = Verdict("sharded", "the parameters of a module sharded by FSDP are not in the graph")
_INSIDE = Verdict(
    "reentrant checkpoint",
    "used by the function of a reentrant checkpoint, which autograd cannot see into; pass "
    "use_reentrant=False",
)
_MOVED = Verdict(
    "moved",
    "moved or cast since the loss was computed; the graph still refers to it as it was before",
)
_INFERENCE = Verdict(
    "made in inference mode",
    "a parameter made inside torch.inference_mode(): torch leaves uses of it out of the graph",
)
_CHANGED = Verdict(
    "changed in place",
    "a view or a value that was changed in place since its use: no gradient can arrive there",
)
_SAME_MEMORY = Verdict(
    "not in the graph",
    "another tensor with the same memory is: this one is its .data, its detach() or another view",
)
_DETACHED = Verdict(
    "detached",
    "the loss was computed with its value as a constant: the path is cut right at it (detach(), "
    ".data, no_grad, or requires_grad set too late)",
)
_NOT_THERE = Verdict(
    "not in the graph",
    "the loss was not computed from it, or the path is cut (detach(), .data, .item(), no_grad, "
    "another copy of the model, requires_grad set too late, a checkpoint with use_reentrant=True "
    "none of whose inputs requires grad), which the graph does not show",
)
_PERHAPS_INSIDE = Verdict(
    "not in the graph",
    f"{_NOT_THERE.why}; or it is in the reentrant checkpoint, which autograd cannot see into",
)


class Reachability:
    """Judges which tensors a loss reaches; `sharded` are the ids of FSDP's parameters."""

    def __init__(self, graph: Subgraph, sharded: Collection[int]) -> None:
        self.graph = graph
        self.sharded = sharded

    def verdict(self, variable: Tensor) -> Verdict:
        """Return whether the loss reaches a tensor, or why not."""
        if not (variable.is_floating_point() or variable.is_complex()):
            return _INTEGER  # such a tensor cannot require grad
        if not variable.requires_grad:
            return _FROZEN_SINCE if id(variable) in self.graph.leaves else _FROZEN
        if not self.graph.roots:
            return _CONSTANT
        if variable.is_inference():
            return _INFERENCE
        if not self.graph.reaches(variable):
            return self._unreached(variable)
        # torch finds the node of a leaf by a view, which __torch_function__ could replace.
        with without_torch_function(), INSIDE:
            is_there = variable.grad_fn is not None or edge(variable).node in self.graph.nodes
        return _REACHED if is_there else _MOVED

    def _unreached(self, variable: Tensor) -> Verdict:
        if id(variable) in self.sharded or is_fsdp_shard(variable):
            return _SHARDED
        if id(variable) in self._checkpointed:
            return _INSIDE
        if variable.grad_fn is not None and (
            has_rebuilt_history(variable) or was_used_before_change(variable, self.graph.nodes)
        ):
            return _CHANGED
        storage, span = _memory_of(variable)
        # A storage, such as a flat vector of many parameters, may have a part for each.
        for other, verdict in self._memory.get(storage, ()):
            if span.start < other.stop and other.start < span.stop:
                return verdict
        has_checkpoint = any(kind.__name__ == _CHECKPOINT for kind in self.graph.kinds)
        return _PERHAPS_INSIDE if has_checkpoint else _NOT_THERE

    @cached_property
    def _checkpointed(self) -> dict[int, Tensor]:
        return checkpointed_tensors(self.graph)

    @cached_property
    def _memory(self) -> dict[int, list[tuple[range, Verdict]]]:
        """The spans of bytes of the leaves in the graph, and of saved tensors, by storage."""
        spans: dict[int, list[tuple[range, Verdict]]] = {}
        packed = (one for node in self.graph.nodes for _, one in packed_tensors(node))
        saved = [(one.data, _DETACHED) for one in packed if isinstance(one.data, Tensor)]
        for tensor, verdict in [(x, _SAME_MEMORY) for x in self.graph.leaves.values()] + saved:
            storage, span = _memory_of(tensor)
            spans.setdefault(storage, []).append((span, verdict))
        return spans


def checkpointed_tensors(graph: Subgraph) -> dict[int, Tensor]:
    """Return the tensors that the functions of a graph's reentrant checkpoints use, by id."""
    nodes = [cast("Any", node) for node in graph.nodes if type(node).__name__ == _CHECKPOINT]
    tensors: dict[int, Tensor] = {}
    for value in captured_by([node.run_function for node in nodes]):
        if isinstance(value, nn.Module):
            tensors |= {id(param): param for param in value.parameters()}
        elif isinstance(value, Tensor):
            tensors[id(value)] = value
    return tensors


def _memory_of(tensor: Tensor) -> tuple[int, range]:
    """Return a tensor's storage, and the span of bytes in it from its first to its last number."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_nested:
        return 0, range(0)  # no storage that could be compared
    storage = tensor.untyped_storage().data_ptr()
    if not storage or not tensor.numel():
        return 0, range(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    start, itemsize = tensor.storage_offset(), tensor.element_size()
    return storage, range(start * itemsize, (start + length) * itemsize)
