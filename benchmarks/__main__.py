"""Runs the comparisons, and prints and writes the table: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import (
    batching,
    combining,
    compiling,
    functions,
    growth,
    harness,
    importing,
    losses,
    optimizing,
    peaks,
    processes,
    report,
    retaining,
    samples,
    stepping,
    tasks,
    unrolling,
    values,
)
from benchmarks.plan import Plan
from benchmarks.row import Row

RESULTS = Path(__file__).parent / "results"
ROOMS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "values": values.rows,
    "losses": losses.rows,
    "peaks": peaks.rows,
    "batching": batching.rows,
    "combining": combining.rows,
    "functions": functions.rows,
    "samples": samples.rows,
    "compiling": compiling.rows,
    "retaining": retaining.rows,
    "stepping": stepping.rows,
    "unrolling": unrolling.rows,
    "tasks": tasks.rows,
    "optimizing": optimizing.rows,
    "processes": processes.rows,
    "importing": importing.rows,
    "growth": growth.rows,
}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Run what the command line asks for.

    Args:
        arguments: The command line; None is the process's own.

    Returns:
        The rows.
    """
    options = _parse(arguments)
    plan = Plan(torch.device(options.device), quick=options.quick)
    if not options.quick:
        harness.keep_heap()
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in options.only or ROOMS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += ROOMS[name](plan)
    about = report.describe(plan.device)
    title = f"{about['device_name']}, torch {torch.__version__}, one thread"
    if options.quick:
        title += "; a quick run, whose figures mean nothing"
    report.print_table(rows, title)
    output: Path | None = options.output
    if output is None and not (options.quick or options.only):
        output = RESULTS
    if output is not None:
        _write(rows, about, title, output)
    return rows


def _write(rows: list[Row], about: dict[str, object], title: str, folder: Path) -> None:
    stem = f"{about['device']}-torch{torch.__version__}"
    report.write_json(rows, about, folder / f"{stem}.json")
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
    parser.add_argument("--output", type=Path, help="a folder for the JSON and the plot")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
