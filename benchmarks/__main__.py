"""Runs the comparisons, and prints and writes the table: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks import report
from benchmarks.plan import Plan
from benchmarks.rooms import ROOMS, measured
from benchmarks.row import Row

RESULTS = Path(__file__).parent / "results"
Rooms: TypeAlias = dict[str, list[Row]]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run what the command line asks for.

    Args:
        arguments: The command line; None is the process's own.

    Returns:
        The rows.
    """
    options = _parse(arguments)
    plan = Plan(torch.device(options.device), quick=options.quick)
    torch.manual_seed(0)
    began = time.monotonic()
    rooms, seconds = _measure(plan, options.only or list(ROOMS), began + 60 * options.minutes)
    rows = [row for of_room in rooms.values() for row in of_room]
    about = report.describe(plan.device) | {"seconds": seconds}
    title = f"{about['device_name']}, torch {torch.__version__}, one thread"
    if options.quick:
        title += "; a quick run, whose figures mean nothing"
    report.print_table(rows, title)
    print(f"{sum(seconds.values()) / 60:.1f} minutes")
    output: Path | None = options.output
    if output is None and not (options.quick or options.only):
        output = RESULTS
    if output is not None:
        _write(rooms, about, title, output)
    return rows


def _measure(plan: Plan, names: Sequence[str], until: float) -> tuple[Rooms, dict[str, float]]:
    """Return the rows and the seconds by room; what runs longer than `until` is left out."""
    rooms: Rooms = {}
    seconds: dict[str, float] = {}
    for name in names:
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, end=" ", flush=True)
        rooms[name] = measured(name, plan, until - began)
        seconds[name] = round(time.monotonic() - began, 1)
        print(f"{seconds[name]:.0f} s", file=sys.stderr, flush=True)
    return rooms, seconds


def _write(rooms: Rooms, about: dict[str, object], title: str, folder: Path) -> None:
    stem = f"{about['device']}-torch{torch.__version__}"
    report.write_json(rooms, about, folder / f"{stem}.json")
    rows = [row for of_room in rooms.values() for row in of_room]
    problem = report.plot_growth(rows, title, folder / f"{stem}-growth.png")
    print(f"\nwritten to {folder}" + (f"; no plot: {problem}" if problem else ""))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"where to measure (here: {default})")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; times mean nothing"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(ROOMS), help="some of the rooms; nothing is written"
    )
    parser.add_argument(
        "--minutes", type=float, default=14.4, help="what would take longer than this is left out"
    )
    parser.add_argument("--output", type=Path, help="a folder for the JSON and the plot")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
