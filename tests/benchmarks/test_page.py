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


def test_a_table_states_what_is_missed(device: torch.device) -> None:
    lines = page.table([MET, MISSED, IDLE]).splitlines()
    assert lines[2] == "| a | 1.00 ms | 1.00 ms, b | 1.000 | <= 1.10x | met |"
    assert lines[3].endswith("| 2.000 | <= 1.60x | **missed by 25.0%** |")
    assert lines[4] == "| e | - | f | - | - | not run: no such thing |"


def test_the_page_is_filled_between_its_marks(device: torch.device) -> None:
    text = (
        "before\n<!-- benchmarks: values -->\nold\n<!-- end of benchmarks -->\nbetween\n"
        "<!-- benchmarks: losses -->\nkept\n<!-- end of benchmarks -->\nafter\n"
    )
    assert page.rooms_on(text) == ["values", "losses"]
    assert page.filled(text, {"values": "new"}) == text.replace("old", "new")
    assert page.filled(page.filled(text, {"values": "new"}), {"values": "old"}) == text


def test_the_tables_are_printed_or_written(
    device: torch.device,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text("<!-- benchmarks: values -->\n<!-- end of benchmarks -->\n")
    page.main([str(results)])
    printed = capsys.readouterr().out
    assert "## values\n\n| call |" in printed
    assert "2026-01-02; 1 minutes. 1 of 2 targets met, 1 rows not run." in printed
    page.main([str(results), "--write"])
    assert page.table([MET, MISSED]) in page.PAGE.read_text()


def test_every_table_of_the_page_is_that_of_a_room(device: torch.device) -> None:
    rooms = page.rooms_on(page.PAGE.read_text(encoding="utf-8"))
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == {*ROOMS, "about"}
