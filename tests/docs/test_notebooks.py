"""The pages and proofs that are notebooks: a cell for each block of code."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = ["learning_to_learn", "quickstart", "why_losses_fight"]
PROOFS = ["hyper_cleaning", "influence"]


def read(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_they_are_the_pages_with_a_header_of_jupytext(device: torch.device) -> None:
    with_header = [path.stem for path in DOCS.glob("*.md") if read(path.stem)[:4] == "---\n"]
    assert sorted(with_header) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_gallery_names_them(device: torch.device, name: str) -> None:
    assert f"({name}.md)" in read("gallery").partition("## Notebooks")[2]


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return the folder of notebooks that `make docs` writes."""
    runpy.run_path(str(DOCS / "notebooks.py"))["write"](DOCS, tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_make_docs_writes_a_cell_for_each_block(
    device: torch.device, name: str, made: Path
) -> None:
    notebook = made / f"{name}.ipynb"
    assert cells(notebook, "code") == re.findall(r"(?s)```python\n(.*?)\n```", read(name))
    assert "".join(cells(notebook, "markdown")).startswith("# ")
    assert sorted(path.stem for path in made.iterdir()) == sorted(NOTEBOOKS + PROOFS)


@pytest.mark.parametrize("name", PROOFS)
def test_the_notebook_of_a_proof_has_all_of_its_code(
    device: torch.device, name: str, made: Path
) -> None:
    scripts = [DOCS.parent / "examples" / "proof" / f"{each}.py" for each in ("_proof", name)]
    defined = [
        ast.unparse(node)
        for script in scripts
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
    ]
    notebook = ast.parse("\n".join(cells(made / f"{name}.ipynb", "code")))
    assert defined == [ast.unparse(node) for node in notebook.body if not _is_other(node)]


def _is_other(node: ast.stmt) -> bool:
    """Return whether it is an import, or one of the lines that run the script."""
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.If)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROOFS)
def test_the_notebook_of_a_proof_runs_in_another_folder(
    device: torch.device,
    name: str,
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for needed in ("sklearn", "matplotlib"):
        pytest.importorskip(needed)
    # What a kernel has; the last cell shows the picture with it.
    notebook, display = ModuleType("notebook"), ModuleType("IPython.display")
    shown: list[str] = []
    monkeypatch.setattr(display, "Image", shown.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    elsewhere = made / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for cell in cells(made / f"{name}.ipynb", "code"):
        exec(cell, vars(notebook))
    printed = capsys.readouterr()
    assert "\nFails: " in printed.out
    assert printed.err == ""  # all claims hold
    assert [Path(each).read_bytes()[:4] for each in shown] == [b"\x89PNG"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_jupytext_makes_a_cell_of_each_block(device: torch.device, name: str) -> None:
    jupytext = pytest.importorskip("jupytext")
    notebook = jupytext.reads(read(name), fmt="md")
    made = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert made == re.findall(r"(?s)```python\n(.*?)\n```", read(name))
    assert notebook.metadata.kernelspec.language == "python"
