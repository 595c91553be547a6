"""What `compare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradkit.report._view.charts import draw_differences
from gradkit.report._view.rendering import Block, Report, Styled, Table, folded, listed, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Difference:
    """How a method differs from `.backward()` at one leaf.

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
    """The same step by several methods, against `.backward()`.

    Attributes:
        called: How the function was called: `loss_fn(params, *args)` or `loss_fn(*args)`.
        values: The losses, for each method.
        refused: For each method that torch cannot run, why.
        differences: `differences[method][leaf]`, for all methods but `.backward()` and the refused.
        notes: What holds for all methods, a sentence each.
    """

    called: str
    values: dict[str, tuple[float, ...]]
    refused: dict[str, str]
    differences: dict[str, dict[str, Difference]]
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all methods that ran gave the same bits at every leaf."""
        return all(d.same for leaves in self.differences.values() for d in leaves.values())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the largest differences, where leaves differ, on `ax` or a new figure."""
        gaps = {
            method: {name: d.absolute for name, d in leaves.items() if not d.same}
            for method, leaves in self.differences.items()
        }
        return draw_differences(self.differing(), gaps, ax)

    def differing(self) -> list[str]:
        """Return the leaves at which some method differs."""
        names = next(iter(self.differences.values()), {})
        return [n for n in names if not all(d[n].same for d in self.differences.values())]

    def _blocks(self) -> Sequence[Block]:
        refused = [f"{method} cannot be compared: {why}" for method, why in self.refused.items()]
        if not self.differences:
            title = f"{self.called}: nothing can be compared with .backward()"
            return [title, *refused, *self.notes]
        params = plural(len(next(iter(self.differences.values()))), "param")
        result = f"{len(self.differing())} of {params} differ"
        if self.same:
            result = f"the same bits in {params}"
        title = f"{self.called}: .backward() against {listed(list(self.differences))}: {result}"
        return [title, self._table(), *self._reasons(), *refused, *self.notes]

    def _table(self) -> Table:
        names = list(next(iter(self.differences.values())))
        kinds = [tuple(leaves[name] for leaves in self.differences.values()) for name in names]
        rows = [
            [label, str(len(members)), *map(_cell, kinds[members[0]])]
            for label, members in folded(names, kinds)
        ]
        return Table(["param", "count", *self.differences], rows)

    def _reasons(self) -> list[str]:
        names: dict[tuple[str, str], list[str]] = {}
        for method, leaves in self.differences.items():
            for name, difference in leaves.items():
                if not difference.same:
                    names.setdefault((method, difference.reason), []).append(name)
        return [f"{method} ({listed(some)}): {why}" for (method, why), some in names.items()]


def _cell(difference: Difference) -> str:
    if difference.same:
        return Styled("same", "good")
    if difference.reason.startswith("None against zero"):
        return Styled("0, not None", "bad")
    ulps = f"{difference.ulps:,.0f}" if difference.ulps < 1e6 else f"{difference.ulps:.0e}"
    return Styled(f"{difference.absolute:.2g} ({ulps} ulp)", "bad")
