"""What the proofs share: options, images of digits, tables over seeds, pictures, the last line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import torch
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def parse(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options: `seeds`, how many there are, and `plot`, the file for a picture."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: 3")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs gradkit[plot]")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds: 1 at least, not {options.seeds}")
    if options.plot is not None:
        _figure()  # now, not after a minute
    return options


def use_one_thread() -> None:
    """Keep torch and scikit-learn to one thread: with matrices this small, more mostly wait."""
    torch.set_num_threads(1)
    threadpool_limits(1)


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Return images, [1797, 64] from 0 to 1 in float64, and their digits, [1797], shuffled."""
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return images[order] / 16, labels[order]


def over_seeds(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean, and the standard deviation where there are several values."""
    text = f"{mean(values):{form}}"
    return f"{text} ± {stdev(values):{form}}" if len(values) > 1 else text


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as text, all columns but the first aligned to the right."""
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install gradkit[plot]") from error
    # Not pyplot, which would keep the figure and choose a backend for the whole process.
    return Figure(figsize=(6, 4.5), layout="constrained")


def save_plot(path: Path | None, draw: Callable[[Axes], object]) -> None:
    """Save what a function draws on axes, if there is a path."""
    if path is None:
        return
    figure = _figure()
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def conclude(claims: dict[str, bool]) -> int:
    """Print which claims do not hold, and the time that it took; return the exit status."""
    for claim, holds in claims.items():
        if not holds:
            print(f"FAILED: {claim}", file=sys.stderr)
    print(f"{time.process_time():.0f} seconds of one core")
    return 0 if all(claims.values()) else 1
