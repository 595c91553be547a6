"""Which loss reaches which parameter, and why not, as far as the graph shows it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradkit._checks import reachability
from gradkit._compat.autograd import without_torch_function
from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import Subgraph, edge, has_rebuilt_history, was_used_before_change
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import captured_by
from gradkit.report.charts import draw
from gradkit.report.tables import Block, Report, Table, folded, listed, plural, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Status: TypeAlias = Literal[
    "reached", "frozen", "constant loss", "not in the graph", "reentrant checkpoint", "sharded",
    "moved", "changed in place", "made in inference mode",
]  # fmt: skip
_QUIET = ("frozen", "constant loss", "not in the graph")
_MAX_COLUMNS = 8


@dataclass(frozen=True)
class Verdict:
    """Whether a gradient of one loss arrives at one parameter.

    Attributes:
        status: `"reached"`, or why not: `"frozen"`, `"constant loss"`, `"not in the graph"`,
            `"reentrant checkpoint"`, `"sharded"`, `"moved"` (moved or cast since) or
            `"changed in place"`, `"made in inference mode"`.
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
            *self._sentences(),
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

    def _sentences(self) -> list[str]:
        return [
            *(f"{loss}: {note}." for loss, graph in self.losses.items() for note in graph.notes),
            *(graph.ends for graph in self.losses.values() if graph.ends),
            *self._reasons(),
            *(f"One tensor: {' = '.join(names)}." for names in self.tied),
            *self.notes,
            *([f"Suggestion: {self.suggestion}."] if self.suggestion else []),
        ]

    def _reasons(self) -> list[str]:
        losses: dict[Verdict, dict[str, list[str]]] = {}
        for loss, row in self.verdicts.items():
            for param, verdict in row.items():
                if verdict.why:
                    losses.setdefault(verdict, {}).setdefault(param, []).append(loss)
        statuses = [verdict.status for verdict in losses]
        return [
            # Where a status has only one reason, the table shows which params it concerns.
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
    status = verdict.status
    style = "dim" if status in _QUIET else "green" if status == "reached" else "red"
    return styled(status, style)


_CHECKPOINT = "CheckpointFunctionBackward"

_REACHED = Verdict("reached")
_FROZEN = Verdict("frozen", "requires_grad is False")
_FROZEN_SINCE = Verdict("frozen", "requires_grad has been set to False since the loss was computed")
_INTEGER = Verdict("frozen", "its dtype is not floating-point, and has no gradient")
_CONSTANT = Verdict(
    "constant loss",
    "the loss carries no graph: made under no_grad or inference_mode, detached, from inputs none "
    "of which requires grad, by a checkpoint with use_reentrant=True of such inputs, or by an "
    "operation that drops it, which gradkit.checked() around the forward pass names",
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
_NOT_THERE = Verdict(
    "not in the graph",
    "the loss was not computed from it, or the path is cut (detach(), .data, .item(), no_grad, "
    "another copy of the model, requires_grad set only since, a checkpoint with use_reentrant=True "
    "none of whose inputs requires grad), which leaves no trace",
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
        is_there = variable.grad_fn is not None or _leaf_node(variable) in self.graph.nodes
        return _REACHED if is_there else _MOVED

    def _unreached(self, variable: Tensor) -> Verdict:
        if id(variable) in self.sharded or reachability.is_fsdp_shard(variable):
            return _SHARDED
        if id(variable) in self._checkpointed:
            return _INSIDE
        if variable.grad_fn is not None and (
            has_rebuilt_history(variable) or was_used_before_change(variable, self.graph.nodes)
        ):
            return _CHANGED
        storage, span = _memory_of(variable)
        # One storage, such as a flat vector of many parameters, may have a part for each.
        spans = self._memory.get(storage, ())
        if any(span.start < other.stop and other.start < span.stop for other in spans):
            return _SAME_MEMORY
        has_checkpoint = any(kind.__name__ == _CHECKPOINT for kind in self.graph.kinds)
        return _PERHAPS_INSIDE if has_checkpoint else _NOT_THERE

    @cached_property
    def _checkpointed(self) -> dict[int, Tensor]:
        return checkpointed_tensors(self.graph)

    @cached_property
    def _memory(self) -> dict[int, list[range]]:
        """The spans of bytes of the leaves in the graph, by storage."""
        spans: dict[int, list[range]] = {}
        for storage, span in map(_memory_of, self.graph.leaves.values()):
            spans.setdefault(storage, []).append(span)
        return spans


def _leaf_node(leaf: Tensor) -> Node:
    # torch finds the node by a view, which __torch_function__ could replace.
    with without_torch_function(), INSIDE:
        return edge(leaf).node


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
