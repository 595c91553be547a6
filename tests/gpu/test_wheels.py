"""The wheels for a machine with a GPU: all that the tests and the benchmarks need, pinned."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from gpu import wheels

ROOT = Path(__file__).resolve().parents[2]
# Of the extra `test`, what `make check` runs and no test imports.
TOOLS = {"ruff", "mypy", "import-linter"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


TAKEN = set(map(plain, wheels.NAMES))
THERE = set(map(plain, wheels.THERE))


def needs(requirements: list[str], extra: str = "") -> set[str]:
    parsed = map(Requirement, requirements)
    return {
        plain(r.name)
        for r in parsed
        # As of the other machine, whatever Python runs this.
        if r.marker is None or r.marker.evaluate({"extra": extra, "python_version": "3.12"})
    }


def test_every_package_of_the_extras_is_taken_or_there(device: torch.device) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    expected = needs([*project["dependencies"], *extras["test"], *extras["bench"]])
    assert expected - TAKEN - THERE == TOOLS


@pytest.mark.parametrize("name", wheels.NAMES)
def test_what_a_package_needs_is_taken_or_there(device: torch.device, name: str) -> None:
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    extra = "quadprog-projector" if name == "torchjd" else ""
    examples = {"torchvision"} if name == "backpack-for-pytorch" else set()
    assert needs(requirements, extra) <= TAKEN | THERE | examples


def test_every_version_is_pinned(device: torch.device) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    assert pinned >= TAKEN


def test_an_older_torch_has_the_optree_that_it_compiles(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(wheels, "tracked", list)
    assert wheels.main(["--torch", "2.11.0", "--output", str(tmp_path)]) == 0
    assert str(tmp_path / "constraints.txt") in commands[0]
    assert "optree==0.19.1\n" in (tmp_path / "constraints.txt").read_text(encoding="utf-8")


def test_no_wheel_is_of_another_machine(device: torch.device) -> None:
    command = wheels.command("3.12", Path("wheels"))
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "--no-deps" in command
    assert not {"torch", "numpy"} & set(command)
