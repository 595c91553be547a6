"""The picture of an explanation: losses at the top, the parts of their graphs with params below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from gradkit.report._view.charts import axes_or_new
from gradkit.report._view.names import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    from gradkit.report._explain.explanation import Explanation, Part

Position: TypeAlias = tuple[float, float]
Names: TypeAlias = Mapping[tuple[str, ...], Sequence[str]]

_LOSS, _HEAD, _TRUNK, _PARAMS = "#fff3cd", "#e3f2fd", "#bbdefb", "#f1f1f1"
_EDGE = "#555555"
_ROW_HEIGHT = 1.6
_MIN_DISTANCE = 0.9
_MAX_LINES = 4
_MAX_INCHES = 80.0  # matplotlib cannot save many more pixels


def draw_parts(explanation: Explanation, names: Names, ax: Axes | None) -> Axes:
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
) -> dict[int, Position]:
    """Put each part below its losses, or at even distances where those are too close."""
    positions: dict[int, Position] = {}
    for depth, row in enumerate(rows, start=1):
        xs = [fmean(columns[name] for name in parts[index].losses) for index in row]
        if any(right - left < _MIN_DISTANCE for left, right in pairwise(sorted(xs))):
            step = len(columns) / len(row)
            xs = [(i + 0.5) * step - 0.5 for i in range(len(row))]
        positions |= {index: (x, -_ROW_HEIGHT * depth) for index, x in zip(row, xs, strict=True)}
    return positions


def _draw_part(ax: Axes, part: Part, position: Position, names: Sequence[str]) -> Text:
    is_head = len(part.losses) == 1
    title = f"{'head' if is_head else 'shared'}: {plural(part.nodes, 'node')}"
    colour = _PARAMS if not part.nodes else _HEAD if is_head else _TRUNK
    return _box(ax, position, "\n".join(([title] if part.nodes else []) + _first(names)), colour)


def _first(names: Sequence[str]) -> list[str]:
    more = len(names) - _MAX_LINES
    return [*names[:_MAX_LINES], f"and {more} more"] if more > 0 else list(names)


def _box(ax: Axes, position: Position, text: str, colour: str) -> Text:
    style = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": _EDGE}
    return ax.text(*position, text, ha="center", va="center", fontsize=9, bbox=style, zorder=2)


def _arrow(ax: Axes, start: Text, end: Text) -> None:
    arrow = {"arrowstyle": "->", "color": _EDGE, "shrinkA": 0, "shrinkB": 0}
    arrow |= {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()}
    ax.annotate("", xy=end.get_position(), xytext=start.get_position(), arrowprops=arrow, zorder=1)
