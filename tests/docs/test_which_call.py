"""The page "Which call?" has every public call; README's table has calls of that page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import gradkit
from gradkit import distributed, dotgrad, func, meta, report, tree

pytestmark = pytest.mark.usefixtures("device")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (gradkit, dotgrad, func, meta, distributed, report, tree)
PAGE = (ROOT / "docs" / "which_call.md").read_text(encoding="utf-8")


def named(page: str) -> set[str]:
    """Return the names that are called, or stand alone, in backticks."""
    spans = re.findall(r"`([^`]+)`", page)
    return {re.split(r"[(\s]", span)[0].rpartition(".")[2] for span in spans}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_call_is_on_the_page(module: ModuleType) -> None:
    calls = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert calls
    assert sorted({*calls} - named(PAGE)) == []
    assert {"Accumulator", "History", "safe_retain", "checked"} <= named(PAGE)


def test_readme_has_no_call_that_the_page_lacks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Which call")[2].partition("\n## ")[0]
    calls = {name for name in named(table) if hasattr(gradkit, name)}
    assert len(calls) >= 6
    assert calls <= named(PAGE) | {"func", "meta", "distributed"}
