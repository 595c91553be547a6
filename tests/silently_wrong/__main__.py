"""Prints the tables, as they should stand in docs/silently_wrong.md."""

from __future__ import annotations

from tests.silently_wrong import SECTIONS, table

for heading, rows in SECTIONS.items():
    print(f"## {heading}\n")
    print(*table(rows), "", sep="\n")
