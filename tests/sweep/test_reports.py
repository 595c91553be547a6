"""Each wrong derivative of torch is reported, or there is a program to report, which shows it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import torch

from gradkit._compat import versions
from gradkit._torch_bugs import table
from gradkit._torch_bugs.table import NODES, OPERATIONS
from tests.silently_wrong import _issues
from tests.sweep import reports
from tests.sweep.issues import ISSUES, NOT_REPORTED, derivatives

here = pytest.mark.skipif(versions.is_untested(), reason="a torch that gradkit was not run on")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about what is in beta
COMPILED = {"cond", "scan", "while_loop"}  # by torch, which takes seconds
FILES = sorted(Path(reports.__file__).parent.glob("[!_]*.py"))
PARAMS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in COMPILED else [])
    for path in FILES
]


def wrong_here(path: Path) -> bool:
    """Return whether the installed torch has the defect, by gradkit's table."""
    names = [name for name, report in NOT_REPORTED.items() if report == path.stem]
    tables = [(OPERATIONS | NODES).get(name) for name in names]
    # What the sweep does not find is wrong in all releases.
    return any(rows is None or table.wrong_here(rows) for rows in tables)


def test_every_row_of_the_table_has_an_issue_or_a_report(device: torch.device) -> None:
    assert ISSUES.keys() == derivatives().keys()
    assert set(NOT_REPORTED.values()) == {path.stem for path in FILES}


def test_the_page_names_the_issues_of_the_table(device: torch.device) -> None:
    """docs/silently_wrong.md has them by row; two are of hooks and of Functions."""
    numbers = {link.rpartition("/")[2] for links in ISSUES.values() for link in links or ()}
    on_page = {link.rpartition("/")[2] for link in _issues.ISSUES.values()}
    assert on_page - {"193671", "197867"} <= numbers


@here
@pytest.mark.parametrize("path", PARAMS)
def test_a_report_shows_what_is_wrong(device: torch.device, path: Path) -> None:
    if not wrong_here(path):
        pytest.skip("this torch does not have it")
    with device:
        shown = runpy.run_path(str(path))
    torch_gives, right = shown["torch_gives"], shown["right"]
    assert torch_gives.shape == right.shape
    assert torch.stack([torch_gives, right]).isfinite().all()
    assert not torch.allclose(torch_gives, right, rtol=0.001, atol=0.001)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_report_stands_alone(device: torch.device, path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} == {"torch"}
