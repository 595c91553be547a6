"""The shards of the tests: each test is in exactly one, beside those that share its processes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.conftest import processes_of, pytest_collection_modifyitems
from tests.shards import Shard, name_of

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


def test_a_shard_leaves_the_other_tests_out(
    device: torch.device, request: pytest.FixtureRequest
) -> None:
    every = [item for item in request.session.items if not processes_of(item)]
    config = mock.Mock()
    config.getoption.return_value = "1/2"
    first, second = shards(2)
    items = list(every)
    pytest_collection_modifyitems(config, items)
    assert items == [item for item in every if item in first]
    rest = [item for item in every if item in second]
    config.hook.pytest_deselected.assert_called_once_with(items=rest)
