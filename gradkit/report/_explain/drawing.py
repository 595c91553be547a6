"""The picture of an explanation: losses above, then the parts of their graphs, with parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from gradkit.report._explain.records import LossGraph, Part
from gradkit.report._view.extras import axes_or_new
from gradkit.report._view.names import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

Place: TypeAlias = tuple[float, float]

_LOSS, _HEAD, _TRUNK, _PARAMS = "#fff3cd", "#e3f2fd", "#bbdefb", "#f1f1f1"
_EDGE = "#555555"
_ROW = 1.6
_APART = 0.9
_LINES = 4
_WIDEST = 80.0  # inches; a picture of more pixels than matplotlib can save helps nobody


Names: TypeAlias = Mapping[tuple[str, ...], Sequence[str]]


def draw_parts(
    losses: Mapping[str, LossGraph], parts: Sequence[Part], names: Names, ax: Axes | None
) -> Axes:
    """Draw an explanation.

    Args:
        losses: The graph of each loss.
        parts: The parts of the graphs.
        names: For every set of losses the parameters that exactly these reach.
        ax: Axes of matplotlib; None makes a figure.

    Returns:
        The axes.
    """
    rows = _rows(parts)
    width = max(len(losses), *map(len, rows), 1)
    bottom = -_ROW * (len(rows) + (() in names))
    ax = axes_or_new(ax, (min(max(5.0, 2.2 * width), _WIDEST), min(2.0 + 1.5 * len(rows), _WIDEST)))
    across = {name: float(x) for x, name in enumerate(losses)}
    boxes = {}
    for index, place in _places(rows, parts, across).items():
        boxes[index] = _draw_part(ax, parts[index], place, names.get(parts[index].losses, ()))
    for name, graph in losses.items():
        told = f"{name}\n(constant)" if graph.part is None else name
        box = _box(ax, (across[name], 0.0), told, _LOSS)
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


def _rows(parts: Sequence[Part]) -> list[list[int]]:
    """Put every part into a row below those that lead into it."""
    depth = [0] * len(parts)
    # Parts are in the order of how many losses share them, and lead into parts of more.
    for index, part in enumerate(parts):
        for below in part.below:
            depth[below] = max(depth[below], depth[index] + 1)
    return [
        [i for i, d in enumerate(depth) if d == row] for row in range(max(depth, default=-1) + 1)
    ]


def _places(
    rows: Sequence[Sequence[int]], parts: Sequence[Part], across: Mapping[str, float]
) -> dict[int, Place]:
    """Return where each part stands: below its losses, or in even steps if those are too close."""
    places: dict[int, Place] = {}
    for depth, row in enumerate(rows, start=1):
        xs = [fmean(across[name] for name in parts[index].losses) for index in row]
        if any(right - left < _APART for left, right in pairwise(sorted(xs))):
            step = len(across) / len(row)
            xs = [(place + 0.5) * step - 0.5 for place in range(len(row))]
        places |= {index: (x, -_ROW * depth) for index, x in zip(row, xs, strict=True)}
    return places


def _draw_part(ax: Axes, part: Part, place: Place, names: Sequence[str]) -> Text:
    is_head = len(part.losses) == 1
    told = f"{'head' if is_head else 'shared'}: {plural(part.nodes, 'node')}"
    colour = _PARAMS if not part.nodes else _HEAD if is_head else _TRUNK
    return _box(ax, place, "\n".join(([told] if part.nodes else []) + _first(names)), colour)


def _first(names: Sequence[str]) -> list[str]:
    more = len(names) - _LINES
    return [*names[:_LINES], f"and {more} more"] if more > 0 else list(names)


def _box(ax: Axes, place: Place, text: str, colour: str) -> Text:
    style = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": _EDGE}
    return ax.text(*place, text, ha="center", va="center", fontsize=9, bbox=style, zorder=2)


def _arrow(ax: Axes, start: Text, end: Text) -> None:
    line = {"arrowstyle": "->", "color": _EDGE, "shrinkA": 0, "shrinkB": 0}
    ends = {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()}
    ax.annotate(
        "",
        xy=end.get_position(),
        xytext=start.get_position(),
        arrowprops={**line, **ends},
        zorder=1,
    )
