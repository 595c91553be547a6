"""The shards of the tests: each test is in exactly one, beside those that share its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import processes_of
from tests.shards import Shard, name_of

ROOT = Path(__file__).resolve().parents[2]
COUNTS = [1, 2, 3, 4, 16]


def shards(count: int) -> list[Shard]:
    return [Shard.parse(f"{number}/{count}") for number in range(1, count + 1)]


@pytest.mark.parametrize("count", COUNTS)
def test_every_test_of_this_run_is_in_one_shard(
    device: torch.device, request: pytest.FixtureRequest, count: int
) -> None:
    for item in request.session.items:
        assert sum(item in shard for shard in shards(count)) == 1, item.nodeid


@pytest.mark.parametrize("count", COUNTS)
def test_tests_that_share_processes_are_in_one_shard(
    device: torch.device, request: pytest.FixtureRequest, count: int
) -> None:
    where: dict[str, set[str]] = {}
    for item in request.session.items:
        if names := processes_of(item):
            assert name_of(item) in names  # one that uses two groups goes with the first
            shared = where.setdefault(name_of(item), set())
            shared.update(str(shard) for shard in shards(count) if item in shard)
    assert all(len(numbers) == 1 for numbers in where.values())


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/0", "a/b", "-1/4", ""])
def test_what_is_no_shard_is_refused(device: torch.device, text: str) -> None:
    with pytest.raises(pytest.UsageError, match="like 2/4"):
        Shard.parse(text)


def collected(*options: str) -> list[str]:
    """Return the tests of a file that pytest would run."""
    file = "tests/tree/test_tree.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", file, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.mark.long
def test_the_shards_of_pytest_are_all_tests_once(device: torch.device) -> None:
    every = collected()
    parts = [collected("--shard", str(shard)) for shard in shards(2)]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(every)
    assert len(set(every)) == len(every)
