"""A test that hangs ends its own process, and no other test: `make gpu` ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.__main__ import LIMIT, SECONDS, _pytest

ROOT = Path(__file__).resolve().parents[2]
# It waits in C, and holds the interpreter's lock.
TESTS = """
import ctypes, pytest

@pytest.mark.parametrize("number", range(8))
def test_before(number):
    pass

def test_that_hangs():
    ctypes.PyDLL(None).sleep(600)

@pytest.mark.parametrize("number", range(8))
def test_after(number):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_rest_runs_on(device: torch.device, tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_hanging.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GRADKIT_EMULATE": ""}
    command = [sys.executable, "-m", "pytest", *_pytest(sys.executable)[3:]]
    options = ["--limit", "3", "-n", workers, "-c", str(ROOT / "pyproject.toml"), "--rootdir", "."]
    run = subprocess.run(
        [*command, *options, "test_hanging.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "1 failed, 16 passed" in run.stdout, run.stdout
    assert "test_that_hangs " in run.stdout
    assert "Timeout (0:00:03)!" in run.stderr + run.stdout
    assert "in test_that_hangs" in run.stderr + run.stdout


def test_a_part_has_time_for_tests_that_hang(device: torch.device) -> None:
    command = _pytest("python")
    assert command[command.index("--limit") + 1] == f"{LIMIT}"
    assert 3 * LIMIT < SECONDS
