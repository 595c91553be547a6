"""Fixtures: every test runs on each device of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.processes import Ranks, ranks

torch.set_num_threads(1)

settings.register_profile(
    "gradkit",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("gradkit")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def _a_group_stays_until_the_next_one_goes() -> Iterator[None]:
    """Give the threads of a process group the time to let go of their last tensor.

    A group is freed by the last that has it. If that is a DDP module, it waits for the threads, and
    holds the interpreter's lock, for which a thread may be waiting: for ever.
    """
    destroy, kept = dist.destroy_process_group, []

    def destroy_later(group: dist.ProcessGroup | None = None) -> None:
        last = group or dist.group.WORLD
        destroy(group)
        kept[:] = [last]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy_later)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two(device: torch.device) -> Iterator[Ranks]:
    """Two processes of one group."""
    with ranks(2, device) as group:
        yield group


@pytest.fixture(scope="session")
def four(device: torch.device) -> Iterator[Ranks]:
    """Four processes of one group."""
    with ranks(4, device) as group:
        yield group


@pytest.fixture(params=[2, 4])
def several(request: pytest.FixtureRequest) -> Ranks:
    """Two processes, and four."""
    group: Ranks = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return group
