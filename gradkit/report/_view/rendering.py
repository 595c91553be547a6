"""Results as sentences and tables: plain text, rich and HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

from gradkit.report._view.extras import import_extra

if TYPE_CHECKING:
    from rich.console import Group

_WIDTH = 100
_NUMBER = re.compile(r"[+-]?(\d|inf|nan)|same$|$")
_RICH = {"good": "green", "bad": "red", "quiet": "dim", "": ""}
_CSS = {"good": "color:#2e7d32", "bad": "color:#c62828", "quiet": "color:#888", "": ""}


class Styled(str):
    """A table cell with a style, `"good"`, `"bad"`, `"quiet"` or none, for outputs with colours."""

    style: str

    def __new__(cls, text: str, style: str) -> Styled:
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


@dataclass(frozen=True)
class Table:
    """Column names, and rows of cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def is_number(self, column: int) -> bool:
        """Return whether a column is all numbers, which are aligned to the right."""
        cells = [row[column] for row in self.rows]
        # The first column has names, some of which start with a digit.
        return all(map(str.isdigit if column == 0 else _NUMBER.match, cells))


Block: TypeAlias = Table | str


class Report:
    """The base of the results: renders what `_blocks` returns."""

    def _blocks(self) -> Sequence[Block]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(
            _table_text(b) if isinstance(b, Table) else _wrapped(b) for b in self._blocks()
        )

    __repr__ = __str__

    def __rich__(self) -> Group:
        return _as_rich(self._blocks())

    def _repr_html_(self) -> str:
        return "\n".join(map(_html, self._blocks()))


def _wrapped(text: str) -> str:
    return fill(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _table_text(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]
    right = [table.is_number(column) for column in range(len(table.columns))]

    def line(cells: Iterable[str]) -> str:
        sides = zip(cells, widths, right, strict=True)
        return "  ".join(f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in sides).rstrip()

    return "\n".join([
        line(table.columns),
        line("-" * width for width in widths),
        *map(line, table.rows),
    ])


def _as_rich(blocks: Sequence[Block]) -> Group:
    import_extra("rich")
    from rich.console import Group
    from rich.text import Text

    # As Text, not as markup, which would take "[0]" for a style.
    return Group(*(_rich_table(b) if isinstance(b, Table) else Text(f"{b}\n") for b in blocks))


def _rich_table(table: Table) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        grid.add_column(Text(column), justify="right" if table.is_number(index) else "left")
    for row in table.rows:
        grid.add_row(*(Text(str(cell), style=_RICH[_style(cell)]) for cell in row))
    return grid


def _html(block: Block) -> str:
    from html import escape

    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    head = "".join(f"<th>{escape(column)}</th>" for column in block.columns)
    rows = [
        "".join(f'<td style="{_CSS[_style(cell)]}">{escape(cell)}</td>' for cell in row)
        for row in block.rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _style(cell: str) -> str:
    return cell.style if isinstance(cell, Styled) else ""
