"""The tables of docs/compile.md say what becomes of each call of gradkit.func that is compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.func import compiled_table as table

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")


def rows(first: str) -> dict[str, tuple[str, ...]]:
    (found,) = re.findall(rf"(?m)^\| {re.escape(first)} \|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in found.splitlines()]
    return {name: tuple(others) for name, *others in cells}


CALLS, OPERATIONS = rows("call of `gradkit.func`"), rows("operation in `fn`")
QUICK = {("`hvp`", "eager"), ("Bessel functions", "`value_and_grads`")}
TABLES = ((CALLS, table.BACKENDS), (OPERATIONS, table.OF_OPERATIONS))
CELLS = [
    pytest.param(
        rows,
        row,
        column,
        id=f"{row}-{column}",
        marks=() if (row, column) in QUICK else pytest.mark.slow,
    )
    for rows, columns in TABLES
    for row in rows
    for column in columns
]


def test_the_page_has_every_row(device: torch.device) -> None:
    assert list(CALLS) == list(table.CALLS)
    assert list(OPERATIONS) == list(table.OPERATIONS)


@pytest.mark.parametrize(("rows", "row", "column"), CELLS)
def test_a_cell_is_what_happens(
    device: torch.device, rows: dict[str, tuple[str, ...]], row: str, column: str
) -> None:
    if rows is CALLS:
        got = table.outcome(table.CALLS[row], table.smooth, column)
        expected = rows[row][table.BACKENDS.index(column)]
    else:
        got = table.outcome(table.CALLS[column], table.OPERATIONS[row], "eager")
        expected = rows[row][table.OF_OPERATIONS.index(column)]
    assert got == expected
