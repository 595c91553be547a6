"""Pictures of numbers: a matrix of cosines, lines over training, differences of leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from gradkit.report._view.extras import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from torch import Tensor

# Distinguishable also for those who do not see red and green apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7b3294", "#56b4e9", "#e69f00", "#666666")
_STYLES = ("-", "--", ":", "-.")  # where the colours come again
_AVERAGED = 2  # on either side
_MOST_NUMBERS = 12
_MOST_ROWS = 40


def cosine_text(cosine: float) -> str:
    """Return a cosine in few digits; one close to zero keeps its sign and its size."""
    if math.isnan(cosine):
        return "nan"
    return f"{cosine:+.2f}" if cosine == 0 or abs(cosine) >= 0.005 else f"{cosine:+.0e}"


def mean(values: Sequence[float]) -> float:
    """Return the mean of those that are finite; inf if there are none."""
    return fmean([v for v in values if math.isfinite(v)] or [math.inf])


def draw_cosines(norms: Mapping[str, float], cosines: Tensor, ax: Axes | None) -> Axes:
    """Draw the matrix of cosines.

    Args:
        norms: The norm of each loss's gradient.
        cosines: `[K, K]`.
        ax: Axes of matplotlib; None makes a figure.

    Returns:
        The axes.
    """
    count = len(norms)
    side = 0.7 * min(count, _MOST_ROWS)
    ax = axes_or_new(ax, (2.5 + side, 1.5 + side))
    ax.imshow(cosines.numpy(), cmap="RdBu", vmin=-1, vmax=1)
    shown = _shown(count)
    names, told = list(norms), [f"{name} ({norm:.3g})" for name, norm in norms.items()]
    ax.set_xticks(shown, [names[place] for place in shown], rotation=30, ha="right")
    ax.set_yticks(shown, [told[place] for place in shown])
    if count <= _MOST_NUMBERS:
        for i, row in enumerate(cosines.tolist()):
            for j, cosine in enumerate(row):
                colour = "white" if abs(cosine) > 0.6 else "black"
                ax.text(j, i, cosine_text(cosine), ha="center", va="center", color=colour)
    ax.set_title("cosines of gradients (in brackets: norms)", fontsize=10)
    return ax


def _shown(count: int) -> range:
    """Return the places that get a label: all of them, or so many that they can be read."""
    return range(0, count, -(-count // _MOST_ROWS) or 1)


def draw_history(
    steps: Sequence[int], lines: Mapping[str, Sequence[float]], ax: Axes | None, what: str
) -> Axes:
    """Draw a record over its steps.

    Args:
        steps: The steps.
        lines: The values of each line.
        ax: Axes of matplotlib; None makes a figure.
        what: What they are: `"cosines"` or `"norms"`.

    Returns:
        The axes.
    """
    ax = axes_or_new(ax, (8, 4))
    if what == "norms":
        ax.set(yscale="log", ylabel="norm of the gradient")
    else:
        ax.axhspan(-1, 0, color="black", alpha=0.05, linewidth=0)
        ax.axhline(0, color="black", linewidth=1)
        ax.text(0.99, 0.04, "conflict", transform=ax.transAxes, ha="right", color="dimgray")
        ax.set(ylabel="cosine of two gradients", ylim=(-1, 1))
    drawn = []
    for index, values in enumerate(lines.values()):
        again, colour = divmod(index, len(_COLOURS))
        style = _STYLES[again % len(_STYLES)]
        drawn.append(_draw_line(ax, steps, values, _COLOURS[colour], style))
    ax.set_xlabel("step")
    if lines:  # given, as a label that begins with "_" is not looked for
        ax.legend(
            drawn, list(lines), frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98)
        )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _draw_line(
    ax: Axes, steps: Sequence[int], values: Sequence[float], colour: str, style: str
) -> Line2D:
    ends = ((max(middle - _AVERAGED, 0), middle + _AVERAGED + 1) for middle in range(len(values)))
    ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    means = [mean(values[a:b]) for a, b in ends]
    return ax.plot(steps, means, style, color=colour, linewidth=2)[0]


def draw_differences(
    names: Sequence[str], gaps: Mapping[str, Mapping[str, float]], ax: Axes | None
) -> Axes:
    """Draw the largest difference of every leaf at which some way differs.

    Args:
        names: Those leaves.
        gaps: For each way the difference at the leaves at which it differs.
        ax: Axes of matplotlib; None makes a figure.

    Returns:
        The axes.
    """
    ax = axes_or_new(ax, (8, 1.5 + 0.35 * min(len(names), _MOST_ROWS)))
    for index, (way, by_leaf) in enumerate(gaps.items()):
        rows = [row for row, name in enumerate(names) if name in by_leaf]
        colour = _COLOURS[index % len(_COLOURS)]
        # Rings of several sizes, so that none hides another where they differ alike.
        size = 11 - 3 * (index % 3)
        gap = [by_leaf[names[row]] for row in rows]
        ax.plot(gap, rows, "o", color=colour, markersize=size, fillstyle="none", label=way)
    if names:
        _scale_of_gaps(ax, [gap for by_leaf in gaps.values() for gap in by_leaf.values()])
        ax.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    else:
        ax.text(0.5, 0.5, "the same bits", transform=ax.transAxes, ha="center", va="center")
    shown = _shown(len(names))
    ax.set_yticks(shown, [names[row] for row in shown])
    ax.invert_yaxis()
    ax.set_xlabel("largest absolute difference from .backward()")
    return ax


def _scale_of_gaps(ax: Axes, gaps: Sequence[float]) -> None:
    """Scale by powers of ten, and linearly close to zero, where None against zero stands."""
    sizes = [gap for gap in gaps if gap and math.isfinite(gap)]
    if not sizes:
        ax.set(xlim=(-0.1, 1))
        ax.set_xticks([0])
        return
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    ax.set_xscale("symlog", linthresh=10.0**low, linscale=0.5)
    step = -(-(high - low + 1) // 8)
    ax.set_xticks([0, *(10.0**power for power in range(low, high + 1, step))])
    ax.minorticks_off()
    ax.set_xlim(left=-0.3 * 10.0**low)
