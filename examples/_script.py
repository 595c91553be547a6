"""What the examples have in common, and what is not about gradients: options, pictures, the end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OUTPUT = Path(__file__).parent / "output"


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every example has, described by its docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny run, for tests")
    parser.add_argument("--device", type=torch.device, default="cpu", help="default: cpu")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: examples/output")
    return parser


def progress_on(console: Console) -> Progress:
    """Return progress bars; a task's field `told` is what stands behind its bar."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[told]}"),
        console=console,
    )


def blank_figure(width: float, height: float) -> Figure:
    """Return a figure of a size in inches."""
    # Not pyplot, which would keep the figure and choose a backend for the whole process.
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes, title: str, **legend: Any) -> None:
    """Title the axes, and take away what is no data."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.legend(frameon=False, **{"fontsize": "small"} | legend)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def save(figure: Figure, path: Path) -> None:
    """Save a picture, in a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def conclude(console: Console, picture: Path, broken: Sequence[str], kept: str) -> int:
    """Tell where the picture is and which promises were broken; return the exit status."""
    console.print(f"picture         {picture}", markup=False, highlight=False, soft_wrap=True)
    for promise in broken:
        Console(stderr=True).print(f"[bold red]FAILED[/] {promise}", soft_wrap=True)
    if not broken:
        console.print(f"[bold green]OK[/] {kept}", soft_wrap=True)
    return 1 if broken else 0
