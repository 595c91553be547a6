"""Charts: cosines, lines over training steps, differences at leaves, and graphs of losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from gradkit._core.tables import folded, import_extra, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from torch import Tensor

    from gradkit.report.explain import Explanation, Part

# The colours differ for those, too, who do not see red and green apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7b3294", "#56b4e9", "#e69f00", "#666666")
_STYLES = ("-", "--", ":", "-.")  # for the second, third, ... use of the colours
_WINDOW = 2  # steps averaged on either side
_MAX_NUMBERS = 16
_MAX_ROWS = 40

# The graphs of losses have these colors.
_LOSS, _HEAD, _TRUNK, _PARAMS, _EDGE = "#fff3cd", "#e3f2fd", "#bbdefb", "#f1f1f1", "#555555"
_ROW_HEIGHT, _MIN_DISTANCE = 1.6, 0.9
_MAX_LOSSES, _MAX_NAMES = 8, 4
_MAX_INCHES = 80.0  # matplotlib cannot save many more pixels


def axes_or_new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the caller's axes, or those of a new pyplot figure of this size in inches."""
    if ax is None:
        figure = import_extra("matplotlib.pyplot").figure(figsize=size, layout="constrained")
        ax = figure.subplots()
    return ax


def cosine_text(cosine: float) -> str:
    """Return a cosine in few digits; one close to zero keeps its sign and its size."""
    if math.isnan(cosine):
        return "nan"
    return f"{cosine:+.2f}" if cosine == 0 or abs(cosine) >= 0.005 else f"{cosine:+.0e}"


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; inf if there are none."""
    return fmean([v for v in values if math.isfinite(v)] or [math.inf])


def draw_cosines(norms: Mapping[str, float], cosines: Tensor, ax: Axes | None) -> Axes:
    """Draw a `[K, K]` matrix of cosines, with the norm of each loss's gradient in its label."""
    count = len(norms)
    side = 0.7 * min(count, _MAX_ROWS)
    ax = axes_or_new(ax, (2.5 + side, 1.5 + side))
    image = ax.imshow(cosines.numpy(), cmap="RdBu", vmin=-1, vmax=1)
    ticks = _labelled(count)
    names, labels = list(norms), [f"{name} ({norm:.3g})" for name, norm in norms.items()]
    ax.set_xticks(ticks, [names[index] for index in ticks], rotation=30, ha="right")
    ax.set_yticks(ticks, [labels[index] for index in ticks])
    ax.figure.colorbar(image, ax=ax, label="cosine (red: conflict)", shrink=0.8)
    if count <= _MAX_NUMBERS:
        _write_numbers(ax, cosines)
    ax.set_title("cosines of gradients (in brackets: norms)", fontsize=10)
    return ax


def _write_numbers(ax: Axes, cosines: Tensor) -> None:
    """Write each cosine into its cell, in letters that fit the caller's axes."""
    box = ax.get_window_extent()
    cell = 72 / ax.figure.dpi * min(box.width, box.height) / len(cosines)  # in points
    for i, row in enumerate(cosines.tolist()):
        for j, cosine in enumerate(row):
            colour = "white" if abs(cosine) > 0.6 else "black"
            text = ax.text(j, i, cosine_text(cosine), ha="center", va="center", color=colour)
            text.set_fontsize(min(10, cell / 4))


def _labelled(count: int) -> range:
    """Return the indices that get a label: all, or as many as can be read."""
    return range(0, count, -(-count // _MAX_ROWS) or 1)


def draw_history(
    steps: Sequence[int], lines: Mapping[str, Sequence[float]], ax: Axes | None, what: str
) -> Axes:
    """Draw `"cosines"` or `"norms"`, one line each, over the steps."""
    ax = axes_or_new(ax, (8, 4))
    if what == "norms":
        ax.set(ylabel="norm of the gradient")
        _scale_norms(ax, [norm for norms in lines.values() for norm in norms])
    else:
        ax.axhspan(-1, 0, color="black", alpha=0.05, linewidth=0)
        ax.axhline(0, color="black", linewidth=1)
        ax.text(0.99, 0.04, "conflict", transform=ax.transAxes, ha="right", color="dimgray")
        ax.set(ylabel="cosine of two gradients", ylim=(-1, 1))
    handles = [_draw_line(ax, steps, values, i) for i, values in enumerate(lines.values())]
    span = 2 * _WINDOW + 1
    ax.set_xlabel(f"step (thin: as measured; thick: mean of {span})")
    if len(steps) == 1:
        ax.set(xlim=(steps[0] - 1, steps[0] + 1), xticks=steps, xlabel="step")
    if not steps:
        ax.text(0.5, 0.5, "no steps", transform=ax.transAxes, ha="center", va="center")
    if lines:  # with handles: matplotlib skips labels that start with "_"
        legend = ax.legend(handles, list(lines), frameon=False, ncols=3, loc="lower right")
        legend.set_bbox_to_anchor((1, 0.98))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _scale_norms(ax: Axes, norms: Sequence[float]) -> None:
    """Scale y by powers of ten; with a norm of zero, linearly close to zero."""
    positive = [norm for norm in norms if norm > 0 and math.isfinite(norm)]
    if 0 in norms and positive:
        ax.set_yscale("symlog", linthresh=min(positive))
    elif positive:
        ax.set_yscale("log")


def _draw_line(ax: Axes, steps: Sequence[int], values: Sequence[float], index: int) -> Line2D:
    cycle, colour_index = divmod(index, len(_COLOURS))
    colour, style = _COLOURS[colour_index], _STYLES[cycle % len(_STYLES)]
    ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    means = [mean(values[max(i - _WINDOW, 0) : i + _WINDOW + 1]) for i in range(len(values))]
    marker = "o" if len(steps) == 1 else ""  # a line through one point cannot be seen
    return ax.plot(steps, means, style, color=colour, linewidth=2, marker=marker)[0]


def draw_differences(
    names: Sequence[str], gaps: Mapping[str, Mapping[str, float]], ax: Axes | None
) -> Axes:
    """Draw the largest difference of each named leaf, a ring for each method; 0 where equal."""
    ax = axes_or_new(ax, (8, 1.5 + 0.35 * min(len(names), _MAX_ROWS)))
    for index, (method, by_leaf) in enumerate(gaps.items()):
        gap = [by_leaf.get(name, 0.0) for name in names]
        size = 11 - 3 * (index % 3)  # no ring hides another where the differences are equal
        colour = _COLOURS[index % len(_COLOURS)]
        ax.plot(gap, range(len(gap)), "o", color=colour, ms=size, fillstyle="none", label=method)
    ax.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    every = [gap for by_leaf in gaps.values() for gap in by_leaf.values()]
    sizes = [gap for gap in every if gap and math.isfinite(gap)]
    if sizes:  # linear close to zero, for None against zero
        ax.set_xscale("symlog", linthresh=min(sizes))
    else:
        ax.set(xlim=(-0.1, 1), xticks=[0])
    if not names:
        ax.text(0.5, 0.5, "equal, bit for bit", transform=ax.transAxes, ha="center", va="center")
    ticks = _labelled(len(names))
    ax.set_yticks(ticks, [names[row] for row in ticks])
    ax.invert_yaxis()
    ax.set_xlabel("largest absolute difference from .backward() (0: equal, bit for bit)")
    return ax


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
    nodes, colour = plural(part.nodes, "node"), _TRUNK
    title = f"shared: {nodes}"
    if len(part.losses) == 1:
        count, colour = len(groups[part.losses[0]]), _HEAD
        title = f"{count} heads: {nodes} each" if count > 1 else f"head: {nodes}"
    lines = [title] if part.nodes else []
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
