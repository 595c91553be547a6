"""Pictures of numbers: a matrix of cosines, lines over training, differences of leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from gradkit.report._extras import axes_or_new

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

# Distinguishable also for those who do not see red and green apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7b3294", "#56b4e9", "#e69f00", "#666666")
_AVERAGED = 2  # on either side
_MOST_NUMBERS = 12


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
    ax = axes_or_new(ax, (2.5 + 0.7 * count, 1.5 + 0.7 * count))
    ax.imshow(cosines.numpy(), cmap="RdBu", vmin=-1, vmax=1)
    ax.set_xticks(range(count), list(norms), rotation=30, ha="right")
    ax.set_yticks(range(count), [f"{name} ({norm:.3g})" for name, norm in norms.items()])
    if count <= _MOST_NUMBERS:
        for i, row in enumerate(cosines.tolist()):
            for j, cosine in enumerate(row):
                colour = "white" if abs(cosine) > 0.6 else "black"
                ax.text(j, i, f"{cosine:+.2f}", ha="center", va="center", color=colour)
    ax.set_title("cosines of gradients (in brackets: norms)", fontsize=10)
    return ax


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
    for index, (label, values) in enumerate(lines.items()):
        _draw_line(ax, steps, values, _COLOURS[index % len(_COLOURS)], label)
    ax.set_xlabel("step")
    if lines:
        ax.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    return ax


def _draw_line(
    ax: Axes, steps: Sequence[int], values: Sequence[float], colour: str, label: str
) -> None:
    ends = ((max(middle - _AVERAGED, 0), middle + _AVERAGED + 1) for middle in range(len(values)))
    ax.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
    ax.plot(steps, [fmean(values[a:b]) for a, b in ends], color=colour, linewidth=2, label=label)


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
    ax = axes_or_new(ax, (8, 1.5 + 0.35 * len(names)))
    for index, (way, by_leaf) in enumerate(gaps.items()):
        rows = [row for row, name in enumerate(names) if name in by_leaf]
        colour = _COLOURS[index % len(_COLOURS)]
        ax.plot(
            [by_leaf[names[row]] for row in rows], rows, "o", color=colour, label=way, alpha=0.8
        )
    if names:
        # Linear close to zero, where None against zero and the sign of a zero stand.
        ax.set_xscale("symlog", linthresh=1e-12)
        ax.legend(frameon=False)
    else:
        ax.text(0.5, 0.5, "the same bits", transform=ax.transAxes, ha="center", va="center")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("largest absolute difference from .backward()")
    return ax
