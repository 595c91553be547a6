"""The results from a machine with a GPU: a part that hangs or fails is said to, and others run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rooms import ROOMS
from gpu import limited, measure, summary

ENDS = {
    "== 1 failed, 503 passed, 2 skipped, 1 error in 62.30s (0:01:02) ==": {
        "failed": 1, "passed": 503, "skipped": 2, "errors": 1,
    },
    "12 passed in 0.10s": {"passed": 12},
    "no line of pytest": {},
}  # fmt: skip


def python(code: str, log: Path, seconds: float = 60) -> str:
    return limited.run([sys.executable, "-c", code], log, seconds)


def test_what_a_command_prints_and_its_outcome_are_in_the_log(
    device: torch.device, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    assert python("print('hello')", log) == "passed"
    assert "\nhello\n" in log.read_text()
    assert summary.outcome_of(log.read_text()).startswith("passed; ")
    assert python("import sys; sys.exit(3)", log) == "failed (exit status 3)"
    assert summary.outcome_of(log.read_text()).startswith("failed (exit status 3); ")


@pytest.mark.long
def test_a_command_that_hangs_is_ended_with_those_it_started(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "GRACE", 0.2)
    late = tmp_path / "late"
    child = f"import time; time.sleep(4); open({str(late)!r}, 'w')"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', {child!r}])
time.sleep(60)
"""
    began = time.monotonic()
    assert python(code, tmp_path / "log", 1) == "out of time (1 s)"
    assert time.monotonic() - began < 30
    time.sleep(5)
    assert not late.exists()


def test_a_long_log_loses_its_middle(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited, "LARGEST", 2 << 20)
    assert python("print('start', 'x' * (3 << 20), 'end')", tmp_path / "log") == "passed"
    content = (tmp_path / "log").read_text()
    assert len(content) < (2 << 20) + 100
    assert "start" in content
    assert "end\n" in content


def test_no_outcome_means_stopped_from_outside(device: torch.device) -> None:
    assert summary.outcome_of("$ command\nhalf a line") == "stopped from outside"


@pytest.mark.parametrize("line", ENDS)
def test_the_counts_are_those_of_pytest(device: torch.device, line: str) -> None:
    assert summary.counts_of(f"= 3 passed, and more\n{line}\n\noutcome: x; 1 s\n") == ENDS[line]


def test_the_summary_has_every_part(device: torch.device, tmp_path: Path) -> None:
    about: dict[str, Any] = {"devices": [], "packages": {"optree": "1"}, "changed": True}
    about |= dict.fromkeys(("driver", "torch", "cuda", "python", "cores", "commit", "date"), "1")
    (tmp_path / "versions.json").write_text(json.dumps(about))
    end = "FAILED a.py::b - E\n=== 1 failed, 2 passed in 3s ===\n\noutcome: failed; 4 s\n"
    (tmp_path / "tests-1-of-2.log").write_text(end)
    (tmp_path / "tests-2-of-2.log").write_text("outcome: out of time (540 s); 540 s\n")
    lines = summary.text(tmp_path).splitlines()
    assert lines[0] == f"# {summary.NO_CUDA}"
    assert "| tests-1-of-2 | failed; 4 s | 2 | 1 | 0 | 0 | 0 |" in lines
    assert "| tests-2-of-2 | out of time (540 s); 540 s | ? | ? | ? | ? | ? |" in lines
    assert "- FAILED a.py::b - E" in lines


def test_a_room_that_fails_leaves_the_rows_of_the_others(device: torch.device) -> None:
    result: dict[str, Any] = {"rooms": {}, "rows": []}
    measure.add(result, "a", "passed", 1.0, "", {"device": "cpu", "rows": [1]})
    measure.add(result, "b", "failed (exit status 1)", 2.0, "traceback", {})
    measure.add(result, "c", "passed", 1.0, "", {"device": "cpu", "rows": [2]})
    assert result["rows"] == [1, 2]
    assert result["device"] == "cpu"
    assert result["rooms"]["b"]["printed"] == "traceback"


@pytest.mark.parametrize("count", [1, 2, 3, 16, 30])
def test_the_parts_of_the_benchmarks_are_all_rooms_once(device: torch.device, count: int) -> None:
    parts = [measure.rooms_of(f"{number}/{count}") for number in range(1, count + 1)]
    assert sorted(name for part in parts for name in part) == sorted(ROOMS)
