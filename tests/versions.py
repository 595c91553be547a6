"""The versions that gradkit is tested with: `make versions` runs them and writes docs/versions.md.

    python tests/versions.py constraints --torch 2.11.0 --optree ""
    python tests/versions.py run [--only 2.11.0]

The first prints constraints.txt with other pins, for `make test TORCH=...`; it needs no package.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
RESULTS = ROOT / "docs" / "versions.json"
HEADER = "versions: "  # of the line that tests/conftest.py puts at the head of a run
# torch.compile in these traces optree up to this version: a comparison in the next it cannot.
LAST_OPTREE = {"2.11": "0.19.1", "2.12": "0.19.1"}


class Cell(NamedTuple):
    """One row of the table: what is installed."""

    torch: str
    python: str
    optree: str = ""

    @property
    def arguments(self) -> list[str]:
        """The arguments of make."""
        pins = {"TORCH": self.torch, "PYTHON": f"python{self.python}", "OPTREE": self.optree}
        return [f"{name}={value}" for name, value in pins.items() if value]


MATRIX = [
    Cell("2.11.0", "3.11", "0.14.0"),
    Cell("2.11.0", "3.12"),
    Cell("2.12.0", "3.11"),
    Cell("2.13.0", "3.11"),
    Cell("2.14.0", "3.12"),
    Cell("2.15.0", "3.13"),
    Cell("2.15.0", "3.14"),
]


def constraints(torch: str, optree: str) -> str:
    """Return constraints.txt with other versions; without any for "newest" and "nightly"."""
    if torch in {"newest", "nightly"}:
        return ""
    pins = {"torch": torch, "optree": optree or LAST_OPTREE.get(torch[:4], "")}
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name, version in pins.items():
        if version:
            text = re.sub(rf"(?m)^{name}==.*$", f"{name}=={version}", text)
    return text


def run(cell: Cell) -> dict[str, str]:
    """Run `make test` with a cell's versions, and return its row of the table."""
    print(f"make test {' '.join(cell.arguments)}", flush=True)
    ended = subprocess.run(
        ["make", "test", *cell.arguments], cwd=ROOT, capture_output=True, text=True
    )
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()[-200:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    row = read_output(lines)
    print(*failed, row["result"], sep="\n", flush=True)
    return row | {"processor": processor()}


def read_output(lines: list[str]) -> dict[str, str]:
    """Return what ran, and the result, from the output of pytest."""
    row = dict.fromkeys(("torch", "python", "optree", "cpu"), "?")
    # Of the first run; the second one is on a device that is emulated.
    for line in lines:
        if line.startswith(HEADER) and "?" in row.values():
            row = dict(pair.split(" ", 1) for pair in line.removeprefix(HEADER).split(", "))
    ends = (re.search(r"(\d+ failed, )?\d+ passed.*? in [\d.]+s", line) for line in lines)
    last = next(filter(None, ends), None)
    return row | {"result": last[0] if last else "it did not run to its end"}


def processor() -> str:
    """Return the model of the processor."""
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"(?m)^model name\s*: (.*)$", text):
            return found[1]
    return platform.machine()


def table(rows: list[dict[str, str]]) -> str:
    """Return the table of the page."""
    names = "torch", "python", "optree", "cpu", "result"
    head = ["| torch | Python | optree | CPU | `make test` |", "|---|---|---|---|---|"]
    ordered = sorted(rows, key=lambda row: row["torch"])
    return "\n".join([
        *head,
        *(f"| {' | '.join(row[name] for name in names)} |" for row in ordered),
    ])


def write(rows: list[dict[str, str]]) -> None:
    """Write the results, and the table between its marks on the page."""
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}{table(rows)}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Print constraints, or run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pins = commands.add_parser("constraints")
    pins.add_argument("--torch", default="")
    pins.add_argument("--optree", default="")
    commands.add_parser("run").add_argument("--only", default="", help="of one release of torch")
    options = parser.parse_args()
    if options.command == "constraints":
        print(constraints(options.torch, options.optree), end="")
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for cell in MATRIX:
        if cell.torch.startswith(options.only):
            row = run(cell)
            same = [one for one in rows if same_cell(one, row)]
            rows = [row if one in same else one for one in rows] if same else [*rows, row]
            write(rows)


def same_cell(one: dict[str, str], other: dict[str, str]) -> bool:
    """Return whether two rows are of the same versions."""
    return all(one[name] == other[name] for name in ("torch", "python", "optree", "cpu"))


if __name__ == "__main__":
    main()
