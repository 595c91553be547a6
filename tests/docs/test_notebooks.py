"""The pages that are notebooks: jupytext makes a cell of each block."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = ["learning_to_learn", "quickstart", "why_losses_fight"]


def read(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_they_are_the_pages_with_a_header_of_jupytext(device: torch.device) -> None:
    with_header = [path.stem for path in DOCS.glob("*.md") if read(path.stem)[:4] == "---\n"]
    assert sorted(with_header) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_gallery_names_them(device: torch.device, name: str) -> None:
    assert f"({name}.md)" in read("gallery").partition("## Notebooks")[2]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_make_docs_writes_a_cell_for_each_block(
    device: torch.device, name: str, tmp_path: Path
) -> None:
    runpy.run_path(str(DOCS / "notebooks.py"))["write"](DOCS, tmp_path)
    made = json.loads((tmp_path / f"{name}.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in made["cells"] if c["cell_type"] == "code"]
    assert cells == re.findall(r"(?s)```python\n(.*?)\n```", read(name))
    text = "".join("".join(c["source"]) for c in made["cells"] if c["cell_type"] == "markdown")
    assert text.startswith("# ")
    assert sorted(path.stem for path in tmp_path.iterdir()) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_jupytext_makes_a_cell_of_each_block(device: torch.device, name: str) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.reads(read(name), fmt="md")
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    blocks = re.findall(r"(?s)```python\n(.*?)\n```", read(name))
    assert cells == blocks
    assert notebook.metadata.kernelspec.language == "python"
