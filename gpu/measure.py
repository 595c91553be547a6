"""Runs a part of the benchmarks, each room in a process of its own, and writes one JSON.

A room that fails or runs out of time does not take the figures of the others with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rooms import ROOMS
from gpu import limited

TAIL = 4000  # characters that are kept of what a room printed, if it failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and return the exit status: 1 if a room has no figures."""
    options = _parse(arguments)
    until = time.monotonic() + options.seconds
    rooms = options.only or rooms_of(options.part)
    result: dict[str, Any] = {"quick": options.quick, "rooms": {}, "rows": []}
    for name in rooms:
        measured = _measure(name, options.device, until - time.monotonic(), quick=options.quick)
        add(result, name, *measured)
        print(f"{name}: {result['rooms'][name]['outcome']}", flush=True)
        text = json.dumps(result, indent=1) + "\n"
        options.output.write_text(text, encoding="utf-8")
    return int(any(room["outcome"] != "passed" for room in result["rooms"].values()))


def rooms_of(part: str) -> list[str]:
    """Return every fourth room from the second on, for "2/4"."""
    number, count = map(int, part.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"expected a part such as 2/4, got {part!r}")
    return [*ROOMS][number - 1 :: count]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu.measure", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="1/1", help="2/4: every fourth room")
    parser.add_argument("--only", nargs="+", choices=list(ROOMS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes; times mean nothing")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all rooms together")
    parser.add_argument("--output", type=Path, required=True, help="the JSON")
    return parser.parse_args(arguments)


def _measure(
    name: str, device: str, seconds: float, *, quick: bool
) -> tuple[str, float, str, dict[str, Any]]:
    """Return how a room ended, its seconds, what it printed, and its JSON, if it wrote one."""
    began = time.monotonic()
    if seconds <= 0:
        return "not started: out of time", 0.0, "", {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks", "--device", device, "--only", name]
        outcome = limited.run(
            [*command, "--output", folder, *["--quick"] * quick], log, seconds - limited.GRACE
        )
        written = [json.loads(path.read_text("utf-8")) for path in Path(folder).glob("*.json")]
        printed = log.read_text("utf-8", "replace")
    return outcome, time.monotonic() - began, printed, written[0] if written else {}


def add(
    result: dict[str, Any],
    name: str,
    outcome: str,
    seconds: float,
    printed: str,
    written: dict[str, Any],
) -> None:
    """Add what a room measured to the result."""
    room: dict[str, Any] = {"outcome": outcome, "seconds": round(seconds, 1)}
    if outcome != "passed":
        room["printed"] = printed[-TAIL:]
    result["rooms"][name] = room
    result["rows"] += written.pop("rows", [])
    result |= {key: value for key, value in written.items() if key not in result}


if __name__ == "__main__":
    sys.exit(main())
