"""Results as sentences and tables: by rich where it is installed, else plain text."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from io import StringIO
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rich.console import Group

K = TypeVar("K", bound=Hashable)
_FILL: Any = {"width": 100, "break_long_words": False, "break_on_hyphens": False}
_NUMBER = re.compile(r"[+-]?(\d|inf|nan)|same$|$")


class Styled(str):
    """A table cell with a style of rich's, such as `"green"`."""

    style = ""


def styled(text: str, style: str) -> Styled:
    """Return a cell in a style."""
    cell = Styled(text)
    cell.style = style
    return cell


@dataclass(frozen=True)
class Table:
    """Column names, and rows of cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def is_number(self, column: int) -> bool:
        """Return whether a column is all numbers, which are aligned to the right."""
        # The first column has names, some of which start with a digit.
        is_number = str.isdigit if column == 0 else _NUMBER.match
        return all(is_number(row[column]) for row in self.rows)


Block: TypeAlias = Table | str


class Report:
    """The base of the results: renders what `_blocks` returns."""

    def _blocks(self) -> Sequence[Block]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(map(_text, self._blocks()))

    __repr__ = __str__

    def __rich__(self) -> Group:
        import_extra("rich")
        from rich.console import Group
        from rich.text import Text

        # Text is no markup, which would take "[0]" for a style.
        blocks = self._blocks()
        return Group(*(Text(f"{b}\n") if isinstance(b, str) else _rich_table(b) for b in blocks))

    def _repr_html_(self) -> str:
        try:
            from rich.console import Console
        except ImportError:
            return f"<pre>{escape(str(self))}</pre>"
        console = Console(width=120, record=True, file=StringIO())
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def import_extra(name: str) -> Any:
    """Import a module of the extra `gradkit[plot]`; an ImportError names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        text = f"{package} is needed for this, and is not installed: pip install gradkit[plot]"
        raise ImportError(text) from error


def _text(block: Block) -> str:
    if isinstance(block, str):
        return fill(block, subsequent_indent="  ", **_FILL)
    columns = list(zip(block.columns, *block.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [f"{cell:{'>' if block.is_number(index) else '<'}{width}}" for cell in column]
        for index, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    head, *rows = ("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))
    return "\n".join([head, "  ".join("-" * width for width in widths), *rows])


def _rich_table(table: Table) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        grid.add_column(Text(column), justify="right" if table.is_number(index) else "left")
    for row in table.rows:
        grid.add_row(*(Text(str(cell), style=getattr(cell, "style", "")) for cell in row))
    return grid


def folded(kinds: Mapping[str, K], prefix: str = "") -> list[tuple[str, list[str], K]]:
    """Group dotted names of one kind by their shortest prefix: each group's label, names, kind."""
    names = list(kinds)
    if len(set(kinds.values())) == 1:
        return [(f"{prefix}*" if len(names) > 1 else names[0], names, kinds[names[0]])]
    children: dict[str, dict[str, K]] = {}
    for name, kind in kinds.items():
        # A name that ends here, without a dot, is a group by itself, whatever else starts like it.
        head, dot, _ = name.removeprefix(prefix).partition(".")
        children.setdefault(f"{prefix}{head}{dot}", {})[name] = kind
    return [group for child, below in children.items() for group in folded(below, child)]


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Return names as `a, b and c`; of many the first few, and how many more there are."""
    shown = [*names[:limit], f"{len(names) - limit} more"] if len(names) > limit else list(names)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 loss`, `3 losses`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
