"""What the examples share that is not about gradients: options, pictures, exit status."""

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
    """Return progress bars; a task's field `status` is the text behind its bar."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[status]}"),
        console=console,
    )


def blank_figure(width: float, height: float) -> Figure:
    """Return a figure of a size in inches."""
    # Not pyplot, which would keep the figure and choose a backend for the whole process.
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Axes, title: str, **legend: Any) -> None:
    """Title the axes, and remove decoration."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.legend(frameon=False, **{"fontsize": "small"} | legend)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def save(figure: Figure, path: Path) -> None:
    """Save a picture; its folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def conclude(console: Console, picture: Path, failed: Sequence[str], summary: str) -> int:
    """Print where the picture is and which checks failed; return the exit status."""
    console.print(f"picture         {picture}", markup=False, highlight=False, soft_wrap=True)
    for check in failed:
        Console(stderr=True).print(f"[bold red]FAILED[/] {check}", soft_wrap=True)
    if not failed:
        console.print(f"[bold green]OK[/] {summary}", soft_wrap=True)
    return 1 if failed else 0
