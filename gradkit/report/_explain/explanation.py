"""What `explain` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkit.report._explain.drawing import draw_parts
from gradkit.report._explain.records import LossGraph, Part, Verdict
from gradkit.report._view.names import folded, listed, plural
from gradkit.report._view.rendering import Block, Report, Styled, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {
    "reached": "good",
    "frozen": "quiet",
    "constant loss": "quiet",
    "not in the graph": "quiet",
}
_MAX_COLUMNS = 8


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
        """Draw losses, the parts of their graphs, and the parameters below each part.

        Args:
            ax: Axes of matplotlib; None makes a figure.

        Returns:
            The axes.
        """
        return draw_parts(self.losses, self.parts, self._names_by_losses(), ax)

    def _names_by_losses(self) -> dict[tuple[str, ...], list[str]]:
        """Return for every set of losses the params that exactly these reach, in few names."""
        params = list(self.params)
        names: dict[tuple[str, ...], list[str]] = {}
        for label, members in folded(params, list(self.params.values())):
            names.setdefault(self.params[params[members[0]]], []).append(label)
        return names

    def _blocks(self) -> Sequence[Block]:
        return [
            f"{plural(len(self.losses), 'loss')}, {plural(len(self.params), 'param')}: "
            f"{plural(self.nodes, 'graph node')}, {self.shared:,} of them shared by several losses",
            self._loss_table(),
            *self._reach_tables(),
            *self._sentences(),
        ]

    def _loss_table(self) -> Table:
        rows = [
            (
                name,
                f"{graph.nodes:,}",
                f"{graph.own:,}",
                f"{graph.nodes - graph.own:,}",
                f"{sum(v.status == 'reached' for v in self.verdicts[name].values()):,}",
            )
            for name, graph in self.losses.items()
        ]
        return Table(("loss", "nodes", "own", "shared", "reaches"), tuple(rows))

    def _reach_tables(self) -> list[Table]:
        names, losses = list(self.params), list(self.losses)
        kinds = [tuple(self.verdicts[loss][name] for loss in losses) for name in names]
        groups = folded(names, kinds)
        tables = []
        for start in range(0, len(losses), _MAX_COLUMNS):
            some = losses[start : start + _MAX_COLUMNS]
            rows = [
                (label, str(len(members)), *(self._cell(loss, names[members[0]]) for loss in some))
                for label, members in groups
            ]
            tables.append(Table(("param", "count", *some), tuple(rows)))
        return tables

    def _cell(self, loss: str, param: str) -> str:
        status = self.verdicts[loss][param].status
        return Styled(status, _STYLES.get(status, "bad"))

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
        names = list(self.params)
        kinds = [tuple(losses.get(name, ())) for name in names]
        return listed([
            label if len(some) == len(self.losses) else f"{label} for {listed(some)}"
            for label, members in folded(names, kinds)
            if (some := kinds[members[0]])
        ])
