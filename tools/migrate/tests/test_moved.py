"""Loops of other people's: moved, they leave the same weights; moved again, nothing changes."""

from __future__ import annotations

import pytest
import torch

from gradkit_migrate import Migrated, migrate
from kinds import MOVED_KINDS
from loops import MOVED, execute

EVERY = {**MOVED, **MOVED_KINDS}


def moved(source: str) -> str:
    result = migrate(source.encode())
    assert result.skipped == []
    assert result.moved > 0
    return result.source.decode()


@pytest.mark.parametrize("name", EVERY)
def test_a_moved_loop_leaves_the_same_weights(device: torch.device, name: str) -> None:
    source, becomes = EVERY[name]
    new = moved(source)
    assert becomes in new
    assert ".backward(" not in new
    (theirs, their_log), (ours, our_log) = execute(source, device), execute(new, device)
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert torch.equal(theirs_one, ours_one)
    assert our_log == their_log


@pytest.mark.parametrize("name", EVERY)
def test_what_was_moved_is_not_changed_again(device: torch.device, name: str) -> None:
    new = moved(EVERY[name][0]).encode()
    assert migrate(new) == Migrated(new, 0, [])
