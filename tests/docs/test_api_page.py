"""The reference has every public name, on the page of its room, with the package's signature."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import gradkit

DOCS = Path(gradkit.__file__).resolve().parent.parent / "docs"
sys.path.append(str(DOCS))
signatures = importlib.import_module("signatures")

PAGES = {name: page.read_text(encoding="utf-8") for name, page in signatures.PAGES.items()}
TEXT = "\n".join(PAGES.values())
SHOWN = signatures.entries(TEXT)


def public_names() -> set[str]:
    """Return the full names in `__all__`; those of `dotgrad` and `errors` once, not at the top."""
    modules = {
        f"gradkit.{name}" if name else "gradkit": signatures.module_of(name)
        for name in signatures.MODULES
    }
    elsewhere = {*gradkit.dotgrad.__all__, *gradkit.errors.__all__, *signatures.MODULES}
    return {
        f"{path}.{name}"
        for path, module in modules.items()
        for name in getattr(module, "__all__")  # noqa: B009
        if path != "gradkit" or name not in elsewhere
    }


def test_every_public_name_has_an_entry(device: torch.device) -> None:
    errors = set(re.findall(r"(?m)^\| `(\w+)` \| `\w+` \|", TEXT))
    shown = set(signatures.names(TEXT)) | {f"gradkit.errors.{name}" for name in errors}
    assert public_names() <= shown


@pytest.mark.parametrize("room", [name for name in PAGES if name != "errors"])
def test_a_page_has_the_names_of_its_room(device: torch.device, room: str) -> None:
    shown = signatures.names(PAGES[room])
    assert shown
    others = {*signatures.MODULES} - {""}
    assert {name.split(".")[1] for name in shown} & others == ({room} - {""})


def test_the_pages_are_in_the_index_and_are_all(device: torch.device) -> None:
    index = (DOCS / "api.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\((api_\w+\.md)\)", index))
    assert linked == {page.name for page in signatures.PAGES.values()}
    assert linked == {path.name for path in DOCS.glob("api_*.md")}
    assert signatures.names(index) == []


def test_every_entry_exists(device: torch.device) -> None:
    for name in signatures.names(TEXT):
        signatures.find(name)


def test_every_function_shows_its_signature(device: torch.device) -> None:
    functions = {name for name in public_names() if inspect.isfunction(signatures.find(name))}
    assert functions <= set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_the_signature_is_that_of_the_package(device: torch.device, name: str) -> None:
    assert SHOWN[name] == signatures.signature(name), (
        "bring it up to date: python docs/signatures.py"
    )


@pytest.mark.parametrize("name", SHOWN)
def test_the_text_of_a_signature_has_every_parameter(device: torch.device, name: str) -> None:
    """Read without the code that writes it: names, order, defaults."""
    parameters = inspect.signature(signatures.find(name)).parameters.values()
    inside = SHOWN[name].partition("(")[2].rpartition(")")[0]
    parsed = re.findall(r"(\*{0,2}\w+)(?:=(\([^)]*\)|[^,]+))?(?:,|$)", inside)
    found = [(text.lstrip("*"), default.strip('"')) for text, default in parsed]
    expected = [
        (p.name, "" if p.default is p.empty else str(p.default))
        for p in parameters
        if p.name != "self"
    ]
    assert found == expected


def test_a_stale_page_is_brought_up_to_date(device: torch.device) -> None:
    stale = TEXT.replace("combine(per_loss, aggregator, *, losses=None)", "combine(per_loss)")
    assert stale != TEXT
    assert signatures.updated(stale) == signatures.updated(TEXT)
