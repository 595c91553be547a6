"""The picture of an explanation: losses at the top, parts of their graphs below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from gradkit.report._view.charts import axes_or_new
from gradkit.report._view.rendering import folded, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

    from gradkit.report._explain.explanation import Explanation, Part

_LOSS, _HEAD, _TRUNK, _PARAMS = "#fff3cd", "#e3f2fd", "#bbdefb", "#f1f1f1"
_EDGE = "#555555"
_ROW_HEIGHT = 1.6
_MIN_DISTANCE = 0.9
_MAX_LOSSES = 8
_MAX_NAMES = 4
_MAX_INCHES = 80.0  # matplotlib cannot save many more pixels


def draw(explanation: Explanation, ax: Axes | None) -> Axes:
    """Draw losses, parts and params; of many losses, those whose graphs are alike as one."""
    losses, parts = explanation.losses, explanation.parts
    groups = _groups(explanation)
    names = _param_names(explanation, groups)
    shown = [i for i, part in enumerate(parts) if len(part.losses) > 1 or part.losses[0] in groups]
    rows = _layers(parts, shown)
    width = max(len(groups), *map(len, rows), 1)
    bottom = -_ROW_HEIGHT * (len(rows) + (() in names))
    inches = min(max(5.0, 2.2 * width), _MAX_INCHES), min(2.0 + 1.5 * len(rows), _MAX_INCHES)
    ax = axes_or_new(ax, inches)
    columns = {name: float(x) for x, group in enumerate(groups.values()) for name in group}
    boxes = {
        index: _draw_part(ax, parts[index], position, groups, names.get(parts[index].losses, ()))
        for index, position in _positions(rows, parts, columns).items()
    }
    for name, group in groups.items():
        part = losses[name].part
        label = "\n".join([*_first(group), *([] if part is not None else ["(constant)"])])
        box = _box(ax, (columns[name], 0.0), label, _LOSS)
        if part is not None:
            _arrow(ax, box, boxes[part])
    for index, box in boxes.items():
        for below in parts[index].below:
            _arrow(ax, box, boxes[below])
    if () in names:
        text = "\n".join(["reached by none", *_first(names[()])])
        _box(ax, ((width - 1) / 2, bottom), text, "white")
    ax.set(xlim=(-0.7, width - 0.3), ylim=(bottom - 0.7, 0.6))
    ax.axis("off")
    return ax


def _groups(explanation: Explanation) -> dict[str, list[str]]:
    """Return the losses that share a column, by the first of them: of many, those alike."""
    if len(explanation.losses) <= _MAX_LOSSES:
        return {name: [name] for name in explanation.losses}
    # Two are alike if they lead into the same shared parts, through heads of the same size.
    kinds: dict[str, list[object]] = {name: [] for name in explanation.losses}
    for index, part in enumerate(explanation.parts):
        is_head = len(part.losses) == 1
        kind = (part.nodes, len(part.params), part.below) if is_head else index
        for name in part.losses:
            kinds[name].append(kind)
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, of_loss in kinds.items():
        alike.setdefault(tuple(of_loss), []).append(name)
    return {names[0]: names for names in alike.values()}


def _param_names(
    explanation: Explanation, groups: Mapping[str, Sequence[str]]
) -> dict[tuple[str, ...], list[str]]:
    """Return the names of params, in few words, by the losses that reach them."""
    first = {name: (one,) for one, group in groups.items() for name in group}
    kinds = {
        param: first[losses[0]] if len(losses) == 1 else losses
        for param, losses in explanation.params.items()
    }
    names: dict[tuple[str, ...], list[str]] = {}
    for label, _, losses in folded(kinds):
        names.setdefault(losses, []).append(label)
    return names


def _layers(parts: Sequence[Part], shown: Sequence[int]) -> list[list[int]]:
    """Put every part that is shown into a row below those that lead into it."""
    depth = [0] * len(parts)
    # Parts are in the order of how many losses share them, and lead into parts of more.
    for index, part in enumerate(parts):
        for below in part.below:
            depth[below] = max(depth[below], depth[index] + 1)
    rows = range(max(depth, default=-1) + 1)
    return [[i for i in shown if depth[i] == row] for row in rows]


def _positions(
    rows: Sequence[Sequence[int]], parts: Sequence[Part], columns: Mapping[str, float]
) -> dict[int, tuple[float, float]]:
    """Put each part below its losses, or at even distances where those are too close."""
    positions: dict[int, tuple[float, float]] = {}
    for depth, row in enumerate(rows, start=1):
        xs = [fmean(columns[name] for name in parts[index].losses) for index in row]
        if any(right - left < _MIN_DISTANCE for left, right in pairwise(sorted(xs))):
            step = (max(columns.values()) + 1) / len(row)
            xs = [(i + 0.5) * step - 0.5 for i in range(len(row))]
        positions |= {index: (x, -_ROW_HEIGHT * depth) for index, x in zip(row, xs, strict=True)}
    return positions


def _draw_part(
    ax: Axes,
    part: Part,
    position: tuple[float, float],
    groups: Mapping[str, Sequence[str]],
    params: Sequence[str],
) -> Text:
    nodes, title, colour = plural(part.nodes, "node"), "shared", _TRUNK
    if len(part.losses) == 1:
        count = len(groups[part.losses[0]])
        title, colour = (f"{count} heads" if count > 1 else "head"), _HEAD
        nodes += " each" if count > 1 else ""
    lines = [f"{title}: {nodes}"] if part.nodes else []
    return _box(ax, position, "\n".join(lines + _first(params)), colour if lines else _PARAMS)


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
