"""A row of the table: two figures, their ratio, and its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.harness import Timing, quartiles, ratios
from benchmarks.harness import ratio as ratio_of


@dataclass(frozen=True, slots=True)
class Want:
    """The largest value that a figure may have, in its unit; "x" is a ratio."""

    limit: float
    unit: str = "x"

    def __str__(self) -> str:
        return f"<= {show(self.limit, self.unit)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        what: What was done.
        against: What it is held against.
        ours: What gradkit took, in `unit`; None if it was not measured.
        theirs: What the other side took.
        unit: Of both.
        ratio: Ours over theirs; for times, that of the first quartiles.
        spread: The quartiles of the rounds' own ratios.
        figure: What is held against `want`, in its unit; None if there was nothing to measure.
        want: None for a row that is there to be seen.
        note: What else there is to say; with no ratio, why there is none.
        details: What the table has no room for.
    """

    what: str
    against: str
    ours: float | None = None
    theirs: float | None = None
    unit: str = "ms"
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    figure: float | None = None
    want: Want | None = None
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Row:
        """Return the row that `dataclasses.asdict` and JSON made these values of."""
        want, spread = values["want"], values["spread"]
        low_and_high = None if spread is None else (spread[0], spread[1])
        given = {field.name: values[field.name] for field in fields(cls)}
        return cls(**given | {"want": want and Want(**want), "spread": low_and_high})

    @property
    def met(self) -> bool | None:
        """Whether the figure meets its target; None if there is no figure, or no target."""
        if self.want is None or self.figure is None:
            return None
        return self.figure <= self.want.limit

    @property
    def verdict(self) -> str:
        """The last column."""
        if self.figure is None and self.ratio is None:
            return f"not run: {self.note}"
        if self.want is None or self.figure is None:
            return "shown"
        if self.met:
            return "met"
        if self.want.unit == "x":
            return f"missed by {self.figure / self.want.limit - 1:.1%}"
        return f"missed by {show(self.figure - self.want.limit, self.want.unit)}"


def timed(
    what: str,
    against: str,
    timings: Mapping[str, Timing],
    *,
    ours: str = "gradkit",
    theirs: str,
    limit: float | None,
    note: str = "",
    details: Mapping[str, Any] | None = None,
) -> Row:
    """Return the row for two sides of one measurement, held against a ratio.

    Args:
        what: What was done.
        against: The other side, in words.
        timings: From `measure`.
        ours: The name of our side in them.
        theirs: The name of the other.
        limit: The target: the largest ratio, or None.
        note: What else there is to say.
        details: What else to write down.

    Returns:
        The row, with every side's quartiles among its details.
    """
    mine, other = timings[ours], timings[theirs]
    ratio = ratio_of(mine, other)
    return Row(
        what=what,
        against=against,
        ours=mine.typical / 1e6,
        theirs=other.typical / 1e6,
        ratio=ratio,
        spread=quartiles(ratios(mine, other)),
        figure=ratio,
        want=None if limit is None else Want(limit),
        note=note,
        details={name: timing.summary() for name, timing in timings.items()} | dict(details or {}),
    )


def show(value: float, unit: str) -> str:
    """Return a number with its unit, with as many digits as it deserves."""
    if unit == "x":
        return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
    if unit == "B":
        return f"{value:,.0f} B"
    if unit in ("modules", "collectives", "guards"):
        return f"{value:.0f} {unit}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f} {unit}"
