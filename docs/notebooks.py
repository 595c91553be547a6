"""The pages and proofs that are notebooks, too: a cell for each block of code, and for the text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_HEADER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
# Scripts of examples/proof, which import what they share from the file `_proof.py`.
PROOFS = ("hyper_cleaning", "influence")
_SHARED = "_proof"
_CODE = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def pages(docs: Path) -> list[Path]:
    """Return the pages that have the header of a notebook."""
    return [
        path
        for path in sorted(docs.glob("*.md"))
        if path.read_text(encoding="utf-8")[:4] == "---\n"
    ]


def _notebook(cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return cells, each "code" or "markdown" and its text, in the format nbformat 4.4."""
    code = {"execution_count": None, "outputs": []}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [
            {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(True)}
            | (code if kind == "code" else {})
            for kind, text in cells
            if text.strip()
        ],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def of_page(source: str) -> dict[str, Any]:
    """Return a page as a notebook."""
    parts = _CODE.split(_HEADER.sub("", source))
    return _notebook(
        ("code" if index % 2 else "markdown", part) for index, part in enumerate(parts)
    )


def of_proof(name: str, folder: Path) -> dict[str, Any]:
    """Return a script as a notebook: it needs no other file, runs one seed, and shows a plot."""
    title, _, text = _docstring(folder / f"{name}.py").partition("\n")
    text = re.sub(r"(?m)^    python .*\n\n", "", text)
    plot = f"{name}.png"
    run = f'use_one_thread()\nmain(["--seeds", "1", "--plot", "{plot}"])\n'
    return _notebook([
        ("markdown", f"# {title}\n{text}"),
        ("markdown", f"The script `examples/proof/{name}.py`, with what it shares with others."),
        ("code", "".join(_blocks(folder / f"{_SHARED}.py"))),
        *(("code", block) for block in _blocks(folder / f"{name}.py")),
        ("code", f'from IPython.display import Image\n\n{run}Image("{plot}")'),
    ])


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _blocks(path: Path) -> Iterator[str]:
    """Yield the parts of a script: its imports and constants, and each function or class.

    Not its docstring, the import of what a cell above has, and the last lines, which run it.
    """
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(True)
    block, end = "", 0
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield block
            block = ""
        is_docstring = end == 0
        is_shared = isinstance(node, ast.ImportFrom) and node.module == _SHARED
        is_run = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not (is_docstring or is_shared or is_run):
            block += "".join(lines[end : node.end_lineno])
        end = node.end_lineno or 0
    yield block


def write(docs: Path, folder: Path) -> None:
    """Write every such page and script as a notebook."""
    folder.mkdir(parents=True, exist_ok=True)
    proofs = docs.parent / "examples" / "proof"
    notebooks = {path.stem: of_page(path.read_text(encoding="utf-8")) for path in pages(docs)}
    notebooks |= {name: of_proof(name, proofs) for name in PROOFS}
    for name, notebook in notebooks.items():
        text = json.dumps(notebook, indent=1)
        (folder / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
