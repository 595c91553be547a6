"""Fixtures: the tests run where the command is installed, and are left out elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("libcst") is None or find_spec("gradkit_migrate") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of the programs that are moved."""
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
