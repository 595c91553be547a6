"""`python -m tests.house`: the lines of gradkit/ by room, and how much of them is code.

A room is a folder, or the files beside the folders. Code is what is no docstring, comment, import
or blank line.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "gradkit"
LINES, FILES = 33_269, 128  # at most
LONGEST, SHORT = 600, 60  # lines of a file; a shorter one says why in its docstring
KINDS = ("files", "lines", "code", "imports", "docstrings", "comments", "blank")


_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def counted(source: str) -> Counter[str]:
    """Return how many lines of a file are of each kind."""
    lines = source.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for index, line in enumerate(lines):
        if line.lstrip().startswith("#"):
            kinds[index] = "comments"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds[node.lineno - 1 : node.end_lineno] = ["imports"] * _height(node)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            kinds[text.lineno - 1 : text.end_lineno] = ["docstrings"] * _height(text)
    return Counter(kinds) + Counter(files=1, lines=len(lines))


def _height(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def rooms() -> dict[str, Counter[str]]:
    """Return the counts of each room, the greatest first."""
    found: dict[str, Counter[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        first, *more = path.relative_to(PACKAGE).parts
        room = found.setdefault(first if more else "(beside the folders)", Counter())
        room.update(counted(path.read_text(encoding="utf-8")))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["lines"]))


def total() -> Counter[str]:
    """Return the counts of the package."""
    return sum(rooms().values(), Counter())


if __name__ == "__main__":
    print("| room |", " | ".join(KINDS), "|")
    print("|---|" + "---:|" * len(KINDS))
    for name, counts in {**rooms(), "gradkit": total()}.items():
        print(f"| {name} |", " | ".join(f"{counts[kind]:,}" for kind in KINDS), "|")
    print(f"\nAt most {LINES:,} lines in {FILES} files.")
