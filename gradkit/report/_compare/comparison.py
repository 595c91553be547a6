"""What `compare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkit.report._view.charts import draw_differences
from gradkit.report._view.names import folded, listed, plural
from gradkit.report._view.page import Block, Report, Table, Toned

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Difference:
    """How a way differs from `.backward()` at one leaf.

    Attributes:
        same: Both gave the same bits, or both None.
        absolute: The largest absolute difference of an entry, where None is zero.
        ulps: The largest difference in units in the last place: how many numbers of the coarser of
            the two dtypes lie between two entries.
        reason: Why, as far as a check has shown; `"unknown"` otherwise; empty if `same`.
    """

    same: bool
    absolute: float
    ulps: float
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """The same step by several ways, against `.backward()`.

    Attributes:
        called: How the function was called: `loss_fn(params, *args)` or `loss_fn(*args)`.
        values: The losses, by each way.
        refused: Why torch cannot go a way, by the way.
        differences: `differences[way][leaf]`, for all ways but `.backward()` and those refused.
        notes: What holds for all ways, a sentence each.
    """

    called: str
    values: dict[str, tuple[float, ...]]
    refused: dict[str, str]
    differences: dict[str, dict[str, Difference]]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all ways that are not refused gave the same bits everywhere."""
        return all(d.same for leaves in self.differences.values() for d in leaves.values())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the largest difference of every leaf that differs, by each way.

        Args:
            ax: Axes of matplotlib; None makes a figure.

        Returns:
            The axes.
        """
        gaps = {
            way: {name: d.absolute for name, d in leaves.items() if not d.same}
            for way, leaves in self.differences.items()
        }
        return draw_differences(self.differing(), gaps, ax)

    def differing(self) -> list[str]:
        """Return the leaves at which some way differs."""
        names = next(iter(self.differences.values()), {})
        return [n for n in names if not all(d[n].same for d in self.differences.values())]

    def _blocks(self) -> Sequence[Block]:
        count = len(next(iter(self.differences.values()), {}))
        ways = listed(list(self.differences))
        told = f"{self.called}: .backward() against {ways}: "
        if self.same:
            told += f"the same bits in {plural(count, 'param')}"
        else:
            told += f"{len(self.differing())} of {plural(count, 'param')} differ"
        if not self.differences:
            told = f"{self.called}: nothing can be compared with .backward()"
        table = [self._table()] if self.differences else []
        blocks: list[Block] = [told, *table, *self._reasons()]
        blocks += [f"{way} cannot be compared: {why}" for way, why in self.refused.items()]
        return [*blocks, *self.notes]

    def _table(self) -> Table:
        names = list(next(iter(self.differences.values()), {}))
        kinds = [tuple(leaves[name] for leaves in self.differences.values()) for name in names]
        rows = [
            (name, str(len(members)), *map(_cell, kinds[members[0]]))
            for name, members in folded(names, kinds)
        ]
        return Table(("param", "count", *self.differences), tuple(rows))

    def _reasons(self) -> list[str]:
        where: dict[tuple[str, str], list[str]] = {}
        for way, leaves in self.differences.items():
            for name, difference in leaves.items():
                if not difference.same:
                    where.setdefault((way, difference.reason), []).append(name)
        return [f"{way} ({listed(names)}): {why}" for (way, why), names in where.items()]


def _cell(difference: Difference) -> str:
    if difference.same:
        return Toned("same", "good")
    if difference.reason.startswith("None against zero"):
        return Toned("0, not None", "bad")
    steps = f"{difference.ulps:,.0f}" if difference.ulps < 1e6 else f"{difference.ulps:.0e}"
    return Toned(f"{difference.absolute:.2g} ({steps} ulp)", "bad")
