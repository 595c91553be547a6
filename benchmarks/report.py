"""The table, for a reader and for a program, and the picture of growth."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.row import Row, show

_VERSIONS = (
    "gradkit",
    "torch",
    "optree",
    "torchjd",
    "opacus",
    "backpack-for-pytorch",
    "higher",
    "torchopt",
)
COLUMNS = ("row", "gradkit", "against", "ratio", "quartiles", "want", "verdict")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as the table shows it, a cell for each of `COLUMNS`."""
    ran = row.ratio is not None or row.figure is not None
    note = f" ({row.note})" if row.note and ran else ""
    return (
        row.what,
        "-" if row.ours is None else show(row.ours, row.unit),
        row.against if row.theirs is None else f"{show(row.theirs, row.unit)}, {row.against}",
        "-" if row.ratio is None else f"{row.ratio:.3f}",
        "-" if row.spread is None else "{:.3f} .. {:.3f}".format(*row.spread),
        "-" if row.want is None else str(row.want),
        row.verdict + note,
    )


def summary(rows: Sequence[Row]) -> str:
    """Return how many of the targets are met, in words."""
    judged = [row.met for row in rows if row.met is not None]
    idle = sum(row.verdict.startswith("not run") for row in rows)
    return f"{judged.count(True)} of {len(judged)} targets met, {idle} rows not run"


def plain(rows: Sequence[Row]) -> str:
    """Return the table in plain text."""
    lines = [COLUMNS, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([padded[0], rule, *padded[1:]])


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print the table, with colours where somebody is looking and rich is installed."""
    if not (sys.stdout.isatty() and _print_in_colour(rows, title)):
        print(f"{title}\n\n{plain(rows)}\n\n{summary(rows)}")


def _print_in_colour(rows: Sequence[Row], title: str) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(*COLUMNS, title=title, caption=summary(rows))
    for row in rows:
        table.add_row(*cells(row), style={True: "green", False: "red", None: "dim"}[row.met])
    Console().print(table)
    return True


def describe(device: torch.device) -> dict[str, Any]:
    """Return what the figures hold for: device, versions and date."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": 1,
        "versions": {name: version(name) for name in _VERSIONS},
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write_json(rooms: Mapping[str, Sequence[Row]], about: dict[str, Any], path: Path) -> None:
    """Write down everything that was measured."""
    table = [
        {"room": room} | asdict(row) | {"met": row.met, "verdict": row.verdict}
        for room, rows in rooms.items()
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"rows": table}, indent=1) + "\n")


def plot_growth(rows: Sequence[Row], title: str, path: Path) -> str:
    """Draw how calls grow, both sides, a panel for each thing that there may be more of.

    Args:
        rows: The rows of the table.
        title: What it holds for.
        path: Where to write the picture.

    Returns:
        Why there is no picture, or nothing.
    """
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "counts" in row.details:
            panel = row.details["noun"], row.details["quantity"]
            panels.setdefault(panel, []).append(row.details)
    if not panels:
        return "no row of growth was measured"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install gradkit[bench])"
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    figure.suptitle(title)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, grown in zip(every, panels.values(), strict=True):
        _draw(axes, grown)
    figure.savefig(path, dpi=120)
    return ""


def _draw(axes: Any, grown: Sequence[Mapping[str, Any]]) -> None:
    first, *_ = grown
    axes.plot(first["counts"], first["raw"], "o--", label=first["against"])
    for growth in grown:
        axes.plot(growth["counts"], growth["gradkit"], "s-", label=f"gradkit.{growth['what']}")
    axes.set(xlabel=f"number of {first['noun']}", ylabel=first["quantity"])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
