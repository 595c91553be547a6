"""What `explain` returns, and its picture: losses at the top, parts of their graphs below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeAlias

from gradkit.report._view.charts import axes_or_new
from gradkit.report._view.rendering import Block, Report, Styled, Table, folded, listed, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

Status: TypeAlias = Literal[
    "reached", "frozen", "constant loss", "not in the graph", "reentrant checkpoint", "sharded",
    "moved", "changed in place",
]  # fmt: skip
_QUIET = ("frozen", "constant loss", "not in the graph")
_MAX_COLUMNS = 8
_LOSS, _HEAD, _TRUNK, _PARAMS = "#fff3cd", "#e3f2fd", "#bbdefb", "#f1f1f1"
_EDGE = "#555555"
_ROW_HEIGHT = 1.6
_MIN_DISTANCE = 0.9
_MAX_NAMES = 4
_MAX_INCHES = 80.0  # matplotlib cannot save many more pixels


@dataclass(frozen=True)
class Verdict:
    """Whether a gradient of one loss arrives at one parameter.

    Attributes:
        status: `"reached"`, or why not: `"frozen"`, `"constant loss"`, `"not in the graph"`,
            `"reentrant checkpoint"`, `"sharded"`, `"moved"` (moved or cast since) or
            `"changed in place"`.
        why: The reason in a sentence; empty if it is reached.
    """

    status: Status
    why: str = ""


@dataclass(frozen=True)
class LossGraph:
    """The graph of one loss.

    Attributes:
        nodes: The number of its nodes. Those that accumulate into leaf tensors are not counted.
        own: How many of them no other loss's graph has.
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
        names: dict[tuple[str, ...], list[str]] = {}  # by the losses that reach them
        for label, _, losses in folded(self.params):
            names.setdefault(losses, []).append(label)
        return _draw(self, names, ax)

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


def _draw(
    explanation: Explanation, names: Mapping[tuple[str, ...], Sequence[str]], ax: Axes | None
) -> Axes:
    """Draw losses and parts; `names` has, for each set of losses, the params that it reaches."""
    losses, parts = explanation.losses, explanation.parts
    rows = _layers(parts)
    width = max(len(losses), *map(len, rows), 1)
    bottom = -_ROW_HEIGHT * (len(rows) + (() in names))
    inches = min(max(5.0, 2.2 * width), _MAX_INCHES), min(2.0 + 1.5 * len(rows), _MAX_INCHES)
    ax = axes_or_new(ax, inches)
    columns = {name: float(x) for x, name in enumerate(losses)}
    boxes = {
        index: _draw_part(ax, parts[index], position, names.get(parts[index].losses, ()))
        for index, position in _positions(rows, parts, columns).items()
    }
    for name, graph in losses.items():
        label = f"{name}\n(constant)" if graph.part is None else name
        box = _box(ax, (columns[name], 0.0), label, _LOSS)
        if graph.part is not None:
            _arrow(ax, box, boxes[graph.part])
    for index, box in boxes.items():
        for below in parts[index].below:
            _arrow(ax, box, boxes[below])
    if () in names:
        text = "\n".join(["reached by none", *_first(names[()])])
        _box(ax, ((width - 1) / 2, bottom), text, "white")
    ax.set(xlim=(-0.7, width - 0.3), ylim=(bottom - 0.7, 0.6))
    ax.axis("off")
    return ax


def _layers(parts: Sequence[Part]) -> list[list[int]]:
    """Put every part into a row below those that lead into it."""
    depth = [0] * len(parts)
    # Parts are in the order of how many losses share them, and lead into parts of more.
    for index, part in enumerate(parts):
        for below in part.below:
            depth[below] = max(depth[below], depth[index] + 1)
    rows = range(max(depth, default=-1) + 1)
    return [[i for i, d in enumerate(depth) if d == row] for row in rows]


def _positions(
    rows: Sequence[Sequence[int]], parts: Sequence[Part], columns: Mapping[str, float]
) -> dict[int, tuple[float, float]]:
    """Put each part below its losses, or at even distances where those are too close."""
    positions: dict[int, tuple[float, float]] = {}
    for depth, row in enumerate(rows, start=1):
        xs = [fmean(columns[name] for name in parts[index].losses) for index in row]
        if any(right - left < _MIN_DISTANCE for left, right in pairwise(sorted(xs))):
            step = len(columns) / len(row)
            xs = [(i + 0.5) * step - 0.5 for i in range(len(row))]
        positions |= {index: (x, -_ROW_HEIGHT * depth) for index, x in zip(row, xs, strict=True)}
    return positions


def _draw_part(ax: Axes, part: Part, position: tuple[float, float], names: Sequence[str]) -> Text:
    is_head = len(part.losses) == 1
    title = f"{'head' if is_head else 'shared'}: {plural(part.nodes, 'node')}"
    colour = _PARAMS if not part.nodes else _HEAD if is_head else _TRUNK
    return _box(ax, position, "\n".join(([title] if part.nodes else []) + _first(names)), colour)


def _first(names: Sequence[str]) -> list[str]:
    more = len(names) - _MAX_NAMES
    return [*names[:_MAX_NAMES], f"and {more} more"] if more > 0 else list(names)


def _box(ax: Axes, position: tuple[float, float], text: str, colour: str) -> Text:
    style = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": _EDGE}
    return ax.text(*position, text, ha="center", va="center", fontsize=9, bbox=style, zorder=2)


def _arrow(ax: Axes, start: Text, end: Text) -> None:
    arrow = {"arrowstyle": "->", "color": _EDGE, "shrinkA": 0, "shrinkB": 0}
    arrow |= {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()}
    ax.annotate("", xy=end.get_position(), xytext=start.get_position(), arrowprops=arrow, zorder=1)
