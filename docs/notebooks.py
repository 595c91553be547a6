"""The pages that are notebooks, too: a cell for each block of code, and for the text between."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def pages(docs: Path) -> list[Path]:
    """Return the pages that have the header of a notebook."""
    return [
        path
        for path in sorted(docs.glob("*.md"))
        if path.read_text(encoding="utf-8")[:4] == "---\n"
    ]


def notebook(source: str) -> dict[str, Any]:
    """Return a page as a notebook, in the format nbformat 4.4."""
    cells: list[dict[str, Any]] = []
    for index, part in enumerate(_CODE.split(_HEADER.sub("", source))):
        if part.strip():
            cell: dict[str, Any] = {"metadata": {}, "source": part.strip("\n").splitlines(True)}
            is_code = index % 2
            cell |= {"cell_type": "code" if is_code else "markdown"}
            cells.append(cell | ({"execution_count": None, "outputs": []} if is_code else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}


def write(docs: Path, folder: Path) -> None:
    """Write every such page as a notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages(docs):
        text = json.dumps(notebook(page.read_text(encoding="utf-8")), indent=1)
        (folder / f"{page.stem}.ipynb").write_text(text + "\n", encoding="utf-8")
