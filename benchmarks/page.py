"""The tables of docs/performance.md: `python -m benchmarks.page`, after `make bench`.

It prints the last results as Markdown, a table for each room; `--write` puts them into the pages,
in place of what stands between `<!-- benchmarks: ROOM -->` and `<!-- end of benchmarks -->`. A
regular expression behind the room picks rows: `<!-- benchmarks: ROOM: Adam -->`. The two pages of
the documentation have figures; `targets.md` has what we want of them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import report
from benchmarks.row import Row

RESULTS = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "performance.md", DOCS / "performance_details.md")
TARGETS = Path(__file__).with_name("targets.md")
_END = "<!-- end of benchmarks -->"
Table: TypeAlias = Callable[[Sequence[Row]], str]
_BLOCK = re.compile(rf"(?s)(<!-- benchmarks: (\w+)(?:: (.*?))? -->\n).*?({_END})")


def by_room(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of a file of results, by room."""
    rooms: dict[str, list[Row]] = {}
    for values in results["rows"]:
        rooms.setdefault(values["room"], []).append(Row.from_plain(values))
    return rooms


def table(rows: Sequence[Row]) -> str:
    """Return what rows have measured, in Markdown."""
    # The ratio first: on a phone, only the first columns are in sight.
    columns = ("ratio", "call", "gradkit", "alternative")
    return _markdown(columns, [(row[3], *row[:3]) for row in map(_cells, rows)])


def targets(rows: Sequence[Row]) -> str:
    """Return what is wanted of rows, in Markdown."""
    columns = ("call", "gradkit", "alternative", "ratio", "target", "")
    return _markdown(columns, [_cells(row) for row in rows])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def _cells(row: Row) -> tuple[str, ...]:
    what, ours, against, ratio, _, want, verdict = report.cells(row)
    return what, ours, against, ratio, want, verdict.removeprefix("shown").strip()


def about(results: Mapping[str, Any]) -> str:
    """Return in a line what the figures hold for."""
    versions = results["versions"]
    return (
        f"{results['device_name']}, {results['platform']}, one thread; torch {versions['torch']}, "
        f"Python {results['python']}, optree {versions['optree']}; {results['date'][:10]}; "
        f"{sum(results['seconds'].values()) / 60:.0f} minutes."
    )


def filled(page: str, rooms: Mapping[str, Sequence[Row]], shown: Table = table) -> str:
    """Return a page with tables between its marks; a room without results keeps what it has."""

    def block(match: re.Match[str]) -> str:
        begin, room, pattern, end = match.groups()
        if room not in rooms:
            return match[0]
        rows = [
            row for row in rooms[room] if re.search(pattern or "", f"{row.what} | {row.against}")
        ]
        return f"{begin}{shown(rows)}\n{end}"

    return _BLOCK.sub(block, page)


def stated(page: str, text: str) -> str:
    """Return a page with a text where it says what its figures hold for."""
    return _BLOCK.sub(
        lambda match: f"{match[1]}{text}\n{match[4]}" if match[2] == "about" else match[0], page
    )


def rooms_on(page: str) -> list[str]:
    """Return the rooms whose tables a page has."""
    return [match[2] for match in _BLOCK.finditer(page)]


def write(results: Mapping[str, Any]) -> None:
    """Write the tables into the pages."""
    rooms = by_room(results)
    for path in PAGES:
        page = filled(path.read_text(encoding="utf-8"), rooms)
        path.write_text(stated(page, about(results)), encoding="utf-8")
    page = filled(TARGETS.read_text(encoding="utf-8"), rooms, targets)
    TARGETS.write_text(stated(page, _with_summary(results)), encoding="utf-8")


def _with_summary(results: Mapping[str, Any]) -> str:
    every = [row for rows in by_room(results).values() for row in rows]
    return f"{about(results)} {report.summary(every)}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, or write them to the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument(
        "results", nargs="?", type=Path, help="a JSON that `make bench` has written"
    )
    parser.add_argument("--write", action="store_true", help="into the pages")
    options = parser.parse_args(arguments)
    path = options.results or max(RESULTS.glob("cpu-*.json"), key=lambda one: one.stat().st_mtime)
    results = json.loads(path.read_text(encoding="utf-8"))
    if options.write:
        write(results)
        return
    for name, rows in by_room(results).items():
        print(f"## {name}\n\n{targets(rows)}\n")
    print(_with_summary(results))


if __name__ == "__main__":
    main()
