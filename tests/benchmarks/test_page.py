"""The tables of the page on performance are those of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import page, report
from benchmarks.rooms import ROOMS
from benchmarks.row import Row, Want

MET = Row(what="a", against="b", ours=1.0, theirs=1.0, ratio=1.0, figure=1.0, want=Want(1.1))
MISSED = Row(what="c", against="d", ours=2.0, theirs=1.0, ratio=2.0, figure=2.0, want=Want(1.6))
IDLE = Row(what="e", against="f", note="no such thing")
ABOUT = {
    "device_name": "a processor",
    "platform": "Linux",
    "date": "2026-01-02T03:04:05",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "optree": "0.20.0"},
    "seconds": {"values": 60.0},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    report.write_json({"values": [MET, MISSED], "losses": [IDLE]}, ABOUT, path)
    return path


def test_rows_come_back_by_room(device: torch.device, results: Path) -> None:
    rooms = page.by_room(json.loads(results.read_text()))
    assert rooms == {"values": [MET, MISSED], "losses": [IDLE]}


def test_a_table_has_what_was_measured(device: torch.device) -> None:
    lines = page.table([MET, MISSED, IDLE]).splitlines()
    assert lines[0] == "| ratio | call | gradkit | alternative |"
    assert lines[2] == "| 1.000 | a | 1.00 ms | 1.00 ms, b |"
    assert lines[3] == "| 2.000 | c | 2.00 ms | 1.00 ms, d |"
    assert lines[4] == "| - | e | - | f |"


def test_a_table_of_targets_states_what_is_missed(device: torch.device) -> None:
    lines = page.targets([MET, MISSED, IDLE]).splitlines()
    assert lines[2].endswith("| 1.000 | <= 1.10x | met |")
    assert lines[3].endswith("| 2.000 | <= 1.60x | missed by 25.0% |")
    assert lines[4].endswith("| - | - | not run: no such thing |")


def marked(room: str, text: str) -> str:
    return f"<!-- benchmarks: {room} -->\n{text}\n<!-- end of benchmarks -->\n"


def test_the_page_is_filled_between_its_marks(device: torch.device) -> None:
    text = f"before\n{marked('values', 'old')}between\n{marked('losses', 'kept')}after\n"
    assert page.rooms_on(text) == ["values", "losses"]
    filled = page.filled(text, {"values": [MET]})
    assert filled == text.replace("old", page.table([MET]))
    assert page.filled(filled, {"values": [MET]}) == filled


def test_a_mark_picks_rows_by_what_they_say(device: torch.device) -> None:
    rooms = {"values": [MET, MISSED]}
    for pattern, row in ("^c", MISSED), ("b$", MET):
        text = marked(f"values: {pattern}", "old")
        assert page.filled(text, rooms) == text.replace("old", page.table([row]))


def test_the_tables_are_printed_or_written(
    device: torch.device,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second, ours = (tmp_path / f"{name}.md" for name in ("first", "second", "targets"))
    monkeypatch.setattr(page, "PAGES", (first, second))
    monkeypatch.setattr(page, "TARGETS", ours)
    for path in first, second, ours:
        path.write_text(marked("values", "") + marked("about", ""))
    page.main([str(results)])
    printed = capsys.readouterr().out
    assert "## values\n\n| call |" in printed
    summary = "2026-01-02; 1 minutes. 1 of 2 targets met, 1 rows not run."
    assert summary in printed
    page.main([str(results), "--write"])
    for path in first, second:
        assert page.table([MET, MISSED]) in path.read_text()
        assert "2026-01-02; 1 minutes.\n" in path.read_text()
    assert page.targets([MET, MISSED]) in ours.read_text()
    assert summary in ours.read_text()


def test_every_table_of_the_pages_is_that_of_a_room(device: torch.device) -> None:
    for path in page.PAGES:
        assert set(page.rooms_on(path.read_text(encoding="utf-8"))) <= {*ROOMS, "about"}
    rooms = page.rooms_on(page.TARGETS.read_text(encoding="utf-8"))
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {*ROOMS, "about"}


def test_the_pages_have_the_figures_of_the_last_results(device: torch.device) -> None:
    """A table with a row that nobody measured would be another one."""
    results = max(page.RESULTS.glob("cpu-*.json"), key=lambda one: one.stat().st_mtime)
    rooms = page.by_room(json.loads(results.read_text()))
    for path in page.PAGES:
        text = path.read_text(encoding="utf-8")
        assert page.filled(text, rooms) == text
    text = page.TARGETS.read_text(encoding="utf-8")
    assert page.filled(text, rooms, page.targets) == text
