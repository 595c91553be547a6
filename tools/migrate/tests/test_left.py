"""Loops that may mean something else when they are moved stay, and the reason is said."""

from __future__ import annotations

import re

import pytest
import torch

from gradkit_migrate import migrate
from left import LEFT, LOOP, SETUP


@pytest.mark.parametrize("name", LEFT)
def test_a_loop_that_is_not_sure_is_left(device: torch.device, name: str) -> None:
    text, reason = LEFT[name]
    source = (SETUP + text).encode()
    result = migrate(source)
    left = result.skipped
    assert (result.source, result.moved) == (source, 0)
    said = "\n".join(part.reason for part in left)
    assert re.search(reason, said), said
    assert all(part.by_hand for part in left)
    lines = source.decode().splitlines()
    words = ("backward", "step", "zero_grad", "clip", "scaler")
    assert all(any(word in lines[part.line - 1] for word in words) for part in left)


def test_the_loop_that_they_vary_is_moved(device: torch.device) -> None:
    result = migrate((SETUP + LOOP).encode())
    assert (result.moved, result.skipped) == (1, [])


def test_a_class_that_is_only_imported_wraps_nothing(device: torch.device) -> None:
    optional = """
try:
    from accelerate import Accelerator
    from lightning.fabric import Fabric as LightningFabric
except ImportError:
    Accelerator = None
"""
    result = migrate((optional + SETUP + LOOP).encode())
    assert (result.moved, result.skipped) == (1, [])
