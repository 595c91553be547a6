"""Runs random programs with gradkit and with plain torch, and prints where they differ."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from tests.fuzz.processes import Plan, fuzz
from tests.fuzz.rooms import ROOMS
from tests.fuzz.runs import WRONG, room_of, run, set_up


def arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="600, or no limit with --programs")
    parser.add_argument("--programs", type=int, help="run the programs below this number")
    parser.add_argument("--program", type=int, help="run this one again, and show the difference")
    parser.add_argument("--only", action="append", choices=list(ROOMS), metavar="ROOM")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if any program was wrong, or none ran."""
    options = arguments(argv)
    if options.program is not None:
        return again(options.seed, options.program)
    seconds = options.seconds or (600 if options.programs is None else float("inf"))
    end = float("inf") if options.programs is None else options.programs
    plan = Plan(options.seed, options.only or tuple(ROOMS), seconds, end, options.jobs)
    start = time.monotonic()
    summary = fuzz(plan)
    rate = summary.total() / (time.monotonic() - start)
    print(f"seed {options.seed}: {summary.total()} programs, {rate:.0f} a second")
    print("\n".join(summary.lines(options.seed)))
    return int(bool(summary.wrong) or not summary.total())


def again(seed: int, number: int) -> int:
    set_up()
    outcome = run(seed, number)
    print(
        f"seed {seed}, program {number}, {room_of(number)}: {outcome.kind}", outcome.text, sep="\n"
    )
    return int(outcome.kind == WRONG)


if __name__ == "__main__":
    sys.exit(main())
