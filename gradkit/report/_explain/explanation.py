"""What `explain` returns: which loss reaches which parameter, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from gradkit.report._explain.drawing import draw
from gradkit.report._view.rendering import Block, Report, Styled, Table, folded, listed, plural

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
    style = "quiet" if status in _QUIET else "good" if status == "reached" else "bad"
    return Styled(status, style)
