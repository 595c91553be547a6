"""docs/silently_wrong.md is true: torch, or a peer, is still wrong there, and gradkit is not.

When `test_it_is_as_the_page_says` fails because `theirs` has changed, upstream has mended it: take
the row out, and what gradkit does about it, after a look at the versions that gradkit allows.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradkit
from gradkit._torch_bugs.table import EVERY_REFUSAL
from tests.silently_wrong import SECTIONS, table
from tests.silently_wrong import processes as two
from tests.silently_wrong._row import VERSIONS, Case, Row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "silently_wrong.md"
ROWS = [row for rows in SECTIONS.values() for row in rows]
ALWAYS_HERE = {"torch", "TorchJD"}  # the other libraries: `make test-slow` installs them
COMPILED = {"second_of_scan", "second_of_while_loop"}
of_two_processes = pytest.mark.xdist_group("silently wrong in two processes")


def marks(row: Row) -> list[pytest.MarkDecorator]:
    """Return what is said of the tests of a row."""
    if row.by not in ALWAYS_HERE or row.id in COMPILED:
        return [pytest.mark.slow]
    if row.id in {trial.__name__ for trial in two.TRIALS}:
        return [pytest.mark.processes, of_two_processes]
    return []


every_row = pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id, marks=marks(row)) for row in ROWS]
)


def deprecated(test: Callable[..., None]) -> Callable[..., None]:
    """Let torch say that something is old, which it may say of what it uses itself."""
    for text in ("torch.triangular_solve is deprecated", "`torch.jit.script_method` is deprecated"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


def verify(row: Row, case: Case) -> None:
    """Assert that a row is true."""
    if row.is_mended:
        verify_mended(row, case)
        return
    assert row.close(case.theirs, row.gives), "upstream gives something else now"
    assert row.close(case.right, row.right), "that is not the right value"
    assert not row.close(row.gives, row.right, factor=10), "that is not wrong"
    if row.same:
        try:
            got = case.ours()
        except gradkit.UnsupportedGraphError as refusal:
            pytest.skip(f"refused, as a custom Function is alive in this process: {refusal}")
        assert row.close(got, row.gives), "gradkit gives something else now"
    elif row.refuses is None:
        assert row.close(case.ours(), row.right), "gradkit is wrong"
    else:
        with pytest.raises(row.refuses) as refused:
            case.ours()
        assert type(refused.value) is row.refuses
        assert "What to do" in str(refused.value)
        if row.instead:
            assert row.close(case.instead(), row.right), "the way round the refusal is wrong"


def verify_mended(row: Row, case: Case) -> None:
    """Assert that torch and gradkit are right, or that both raise."""
    if isinstance(case.theirs, str):
        with pytest.raises(gradkit.UnsupportedGraphError):
            case.ours()
    else:
        assert row.close(case.theirs, row.right), "this torch is still wrong"
        assert row.close(case.ours(), row.right), "gradkit is wrong"
    assert row.close(case.right, row.right), "that is not the right value"


@every_row
@deprecated
def test_it_is_as_the_page_says(device: torch.device, row: Row) -> None:
    """Any warning would fail it: then torch would not be silent."""
    verify(row, row.show(device))


# --- the tests would notice


OTHERWISE = "it raises something else"


def wrong_about(row: Row, case: Case) -> dict[str, tuple[Row, Case]]:
    """Return the row, and what came out, with one thing changed."""
    changed = {
        "upstream has mended it": (row, replace(case, theirs=case.right)),
        "the page has the right value as the wrong one": (replace(row, gives=row.right), case),
        "the page has the wrong value as the right one": (replace(row, right=row.gives), case),
    }
    if row.refuses is None:
        other = case.right if row.same else case.theirs
        changed["gradkit has changed"] = (row, replace(case, ours=lambda: other))
        changed["it should refuse"] = (replace(row, refuses=gradkit.UnsupportedGraphError), case)
        if row.same:
            del changed["it should refuse"]
            changed["it should be right"] = (replace(row, same=False), case)
    else:
        changed["it does not refuse"] = (row, replace(case, ours=lambda: case.right))
        changed[OTHERWISE] = (replace(row, refuses=gradkit.FreedGraphError), case)
    if row.instead:
        changed["the way round is wrong"] = (row, replace(case, instead=lambda: case.theirs))
    return changed


@every_row
@deprecated
def test_a_row_that_is_not_true_fails(device: torch.device, row: Row) -> None:
    if row.is_mended:
        pytest.skip("this torch is not wrong")
    for name in wrong_about(row, row.show(device)):
        changed, case = wrong_about(row, row.show(device))[name]  # as a graph serves once
        noticed: Any = row.refuses if name == OTHERWISE else (AssertionError, pytest.fail.Exception)
        if row.same:  # where a custom Function is alive, graphs are looked at, and refused
            noticed = (AssertionError, pytest.fail.Exception, gradkit.UnsupportedGraphError)
        with pytest.raises(noticed):
            verify(changed, case)


# --- the page


def sections() -> dict[str, str]:
    """Return the sections of the page by their headings."""
    parts = re.split(r"(?m)^## (.*)$", PAGE.read_text(encoding="utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_page_has_exactly_these_rows(device: torch.device) -> None:
    """`python -m tests.silently_wrong` prints the tables."""
    found = sections()
    assert list(found) == list(SECTIONS)
    for heading, rows in SECTIONS.items():
        lines = [line for line in found[heading].splitlines() if line.startswith("|")]
        assert lines == table(rows)


def test_every_row_has_a_name_and_a_line_of_its_own(device: torch.device) -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len({row.line for row in ROWS}) == len(ROWS)
    assert all(row.line.count("|") == 6 for row in ROWS)


def test_the_versions_are_on_the_page(device: torch.device) -> None:
    assert {row.by for row in ROWS} == set(VERSIONS)
    head = PAGE.read_text(encoding="utf-8").split("\n## ", 1)[0]
    for name, version in VERSIONS.items():
        assert f"{name} {version}" in head


def test_every_trap_of_torch_func_is_on_the_page(device: torch.device) -> None:
    inputs = " ".join(row.input for row in ROWS)
    assert [name for name in EVERY_REFUSAL if not re.search(rf"\b{name}\b", inputs)] == []


def test_a_value_is_compared_to_the_digits_of_the_page(device: torch.device) -> None:
    row = ROWS[0]
    nan = torch.tensor([float("nan"), 1.0], device=device)
    assert row.close(nan, [float("nan"), 1.0004])
    pairs: list[tuple[Any, Any]] = [
        (nan, [0.0, 1.0]), ([1.0], [1.01]), ([1.0], [1.0, 1.0]), (None, [0.0]), ([0.0], None),
        (0.0, None), ([[1.0]], [1.0]), (float("inf"), 1.0),
    ]  # fmt: skip
    for got, expected in pairs:
        assert not row.close(got, expected)
        assert not row.close(expected, got)


@of_two_processes
@pytest.mark.processes
def test_no_process_is_left(device: torch.device) -> None:
    others = multiprocessing.active_children()  # those of the fixtures stay
    two.run()
    assert set(multiprocessing.active_children()) <= set(others)
