"""The tables of docs/performance.md: `python -m benchmarks.page`, after `make bench`.

It prints the last results as Markdown, a table for each room; `--write` puts each into the page, in
place of what stands between `<!-- benchmarks: ROOM -->` and `<!-- end of benchmarks -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.row import Row

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_COLUMNS = ("call", "gradkit", "against", "ratio", "target", "")
_END = "<!-- end of benchmarks -->"
_BLOCK = re.compile(rf"(?s)(<!-- benchmarks: (\w+) -->\n).*?({_END})")


def by_room(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of a file of results, by room."""
    rooms: dict[str, list[Row]] = {}
    for values in results["rows"]:
        rooms.setdefault(values["room"], []).append(Row.from_plain(values))
    return rooms


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown; what was missed is bold."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    what, ours, against, ratio, _, want, verdict = report.cells(row)
    shown = verdict.removeprefix("shown").strip()
    return what, ours, against, ratio, want, f"**{shown}**" if row.met is False else shown


def about(results: Mapping[str, Any]) -> str:
    """Return in a line what the figures hold for."""
    versions = results["versions"]
    return (
        f"{results['device_name']}, {results['platform']}, one thread; torch {versions['torch']}, "
        f"Python {results['python']}, optree {versions['optree']}; {results['date'][:10]}; "
        f"{sum(results['seconds'].values()) / 60:.0f} minutes."
    )


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with tables between its marks; a room without results keeps what it has."""

    def block(match: re.Match[str]) -> str:
        begin, room, end = match.groups()
        return f"{begin}{tables[room]}\n{end}" if room in tables else match[0]

    return _BLOCK.sub(block, page)


def rooms_on(page: str) -> list[str]:
    """Return the rooms whose tables a page has."""
    return [match[2] for match in _BLOCK.finditer(page)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or write them to the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument(
        "results", nargs="?", type=Path, help="a JSON that `make bench` has written"
    )
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args(arguments)
    path = options.results or max(RESULTS.glob("cpu-*.json"), key=lambda one: one.stat().st_mtime)
    results = json.loads(path.read_text(encoding="utf-8"))
    rooms = by_room(results)
    tables = {name: table(rows) for name, rows in rooms.items()}
    every = [row for rows in rooms.values() for row in rows]
    tables["about"] = f"{about(results)} {report.summary(every)}."
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(filled(page, tables), encoding="utf-8")
        return
    for name, text in tables.items():
        print(f"## {name}\n\n{text}\n")


if __name__ == "__main__":
    main()
