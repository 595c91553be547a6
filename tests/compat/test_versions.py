"""Which torch and which optree gradkit runs on, and what it says on another."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import gradkit
from gradkit._compat import versions

ROOT = Path(__file__).resolve().parents[2]


def test_the_floors_are_those_of_the_project(device: torch.device) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {name: f"{name}>={major}.{minor}" for name, (major, minor) in versions.FLOORS.items()}
    assert project["dependencies"] == list(floors.values())


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("torch", "2.10.1+cu128", r"gradkit needs torch>=2\.11; 2\.10\.1\+cu128 is installed"),
        ("torch", None, r"gradkit needs torch>=2\.11; it is not installed"),
        ("optree", "0.13.1", r"gradkit needs optree>=0\.14; 0\.13\.1 is installed"),
    ],
)
def test_what_is_missing_or_too_old_is_an_import_error(
    device: torch.device, package: str, version: str | None, text: str
) -> None:
    with pytest.raises(ImportError, match=f"{text}.*pip install '{package}"):
        versions.require(package, version)


@pytest.mark.long
@pytest.mark.parametrize("package", ["torch", "optree"])
def test_one_import_error_without_a_package(device: torch.device, package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import gradkit"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert re.fullmatch(rf"ImportError: gradkit needs {package}>=.* is not installed\. .*", last)


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0", (2, 13)), ("2.11.0+cu130", (2, 11)), ("2.16.0.dev20261101", (2, 16)), ("", (0, 0))],
)
def test_a_release_is_two_numbers(
    device: torch.device, version: str, release: tuple[int, int]
) -> None:
    assert versions.release(version) == release


@pytest.mark.parametrize(
    ("version", "mended"),
    [
        ("2.13.1", False), ("2.14.0", True), ("2.14.0+cu132", True), ("2.15.0.dev1", True),
        ("2.14.0.dev20260501", False), ("2.14.0a0+git1234", False), ("2.14.0rc2", False),
    ],
)  # fmt: skip
def test_since_when_a_defect_is_mended(device: torch.device, version: str, mended: bool) -> None:
    assert versions.is_mended("CdistBackward0", version) is mended
    assert not versions.is_mended("cdist", version)


def test_a_torch_that_was_not_run_is_warned_of(device: torch.device) -> None:
    major, minor = versions.NEWEST
    versions.warn_if_untested(f"{major}.{minor}.3")
    with pytest.warns(gradkit.GradkitWarning, match=r"newer than .*python -m gradkit"):
        versions.warn_if_untested(f"{major}.{minor + 1}.0")
