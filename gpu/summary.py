"""The summary of a folder of results: what ran, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.limited import OUTCOME

COUNTED = ("passed", "failed", "errors", "skipped", "xfailed")
NO_CUDA = "no CUDA device: the CUDA shards are skipped"


def text(folder: Path) -> str:
    """Return the summary as Markdown."""
    about = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    logs = sorted(folder.glob("*.log"))
    measured = sorted(folder.glob("benchmarks*.json"))
    lines = [
        *_title(about),
        "",
        f"| tests | outcome | {' | '.join(COUNTED)} |",
        f"|---|---|{'---|' * len(COUNTED)}",
        *(_row(log) for log in logs),
        *(line for path in measured for line in _rooms(path)),
        *(line for log in logs for line in _failures(log)),
    ]
    return "\n".join(lines) + "\n"


def _title(about: dict[str, Any]) -> Iterator[str]:
    devices = about["devices"]
    yield f"# {devices[0]['name'] if devices else NO_CUDA}"
    yield ""
    changed = ", changed" if about["changed"] else ""
    yield (
        f"{len(devices)} CUDA devices, driver {about['driver']}, torch {about['torch']}, "
        f"CUDA {about['cuda']}, Python {about['python']}, optree {about['packages']['optree']}, "
        f"{about['cores']} cores, commit {about['commit']}{changed}, {about['date']}"
    )


def _row(log: Path) -> str:
    content = log.read_text("utf-8", "replace")
    counts = counts_of(content)
    cells = " | ".join(str(counts.get(name, 0)) if counts else "?" for name in COUNTED)
    return f"| {log.stem} | {outcome_of(content)} | {cells} |"


def outcome_of(content: str) -> str:
    """Return the outcome on the last line of a log."""
    last = content.rstrip().rpartition("\n")[2]
    return last.removeprefix(OUTCOME) if last.startswith(OUTCOME) else "stopped from outside"


def counts_of(content: str) -> dict[str, int]:
    """Return the numbers on the line with which pytest ends; none if it did not come to that."""
    ends = re.findall(r"(?m)^=* ?((?:\d+ [a-z]+,? )+)in [\d.]+s", content)
    counts = re.findall(r"(\d+) ([a-z]+)", ends[-1] if ends else "")
    return {{"error": "errors"}.get(name, name): int(number) for number, name in counts}


def _failures(log: Path) -> Iterator[str]:
    """Yield the tests that failed; where pytest was killed, there is no such list."""
    failed = re.findall(r"(?m)^(?:FAILED|ERROR) .*", log.read_text("utf-8", "replace"))
    if failed:
        yield from ("", f"## {log.stem}", "", *(f"- {line[:300]}" for line in failed))


def _rooms(path: Path) -> Iterator[str]:
    """Yield the table of the benchmarks' rooms, and the rows that are not as wanted."""
    result = json.loads(path.read_text(encoding="utf-8"))
    yield from ("", f"| {path.stem} | outcome | seconds |", "|---|---|---|")
    for name, room in result["rooms"].items():
        yield f"| {name} | {room['outcome']} | {room['seconds']} |"
    yield ""
    if result["quick"]:
        yield f"{len(result['rows'])} rows of a quick run, whose figures mean nothing."
        return
    met = [row["met"] for row in result["rows"] if row["met"] is not None]
    yield f"{len(result['rows'])} rows; {met.count(True)} of {len(met)} targets are met."
    for row in result["rows"]:
        if row["met"] is False:
            yield f"- {row['what']}, against {row['against']}: {row['verdict']}"
