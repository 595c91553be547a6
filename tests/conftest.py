"""Fixtures: every test runs on each device of the machine, or on one that is asked for."""

from __future__ import annotations

import faulthandler
import gc
import os
import platform
import sys
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing.util import get_temp_dir
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.accelerator import build, emulation
from tests.accelerator.unsupported import mark_unsupported, missing_kernel
from tests.processes import Ranks, device_of_ranks, ranks
from tests.shards import Shard
from tests.versions import HEADER

torch.set_num_threads(1)
# The same product has the same bits whatever ran before, and is allowed where all must be so.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

settings.register_profile(
    "gradkit",
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("fast", settings.get_profile("gradkit"), max_examples=6)
settings.load_profile("gradkit")

SIZES = {"two": 2, "four": 4}  # the fixtures whose processes stay, and how many they are

NOT_EMULATED: str | None = None  # why GRADKIT_EMULATE=cuda has no effect, if it has none
try:
    NOT_EMULATED = emulation.start()
except build.BuildError as error:
    raise pytest.UsageError(f"tests/accelerator/library does not compile: {error}") from None

HERE = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ONLY = os.environ.get("GRADKIT_TEST_DEVICE") or emulation.KIND
DEVICES = [ONLY] if ONLY else HERE


def pytest_collectstart(collector: pytest.Collector) -> None:
    # torch.testing loads a profile of its own where a test module imports it. A test has that which
    # is loaded when it is defined.
    settings.load_profile(collector.config.getoption("--hypothesis-profile") or "gradkit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="run a part: 2/4 is the second of four")
    help_ = "seconds after which the process of a test that has not ended is killed"
    parser.addoption("--limit", type=float, default=600, help=help_)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected
    Shard.parse(config.getoption("--shard"))
    _standard_error.append(os.dup(sys.stderr.fileno()))  # tests have another: it is captured
    config.add_cleanup(lambda: os.close(_standard_error.pop()))
    if ONLY and ONLY not in (*HERE, emulation.KIND):
        raise pytest.UsageError(f"GRADKIT_TEST_DEVICE is {ONLY!r}; there is: {', '.join(HERE)}")
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit it
        remove_temporary_files(config)


_standard_error: list[int] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Show where a test hangs, and kill its process; pytest-xdist has another one run the rest."""
    limit = item.config.getoption("--limit")
    # By a thread of C: one that hangs may hold the interpreter's lock.
    faulthandler.dump_traceback_later(limit, exit=True, file=_standard_error[0])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that needs a kernel which an emulated accelerator does not have."""
    try:
        return (yield)
    except Exception as error:
        if reason := missing_kernel(error):
            pytest.skip(reason)
        raise


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Have the rest run where a test kills its process."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


def pytest_enter_pdb() -> None:
    """Leave a test that is debugged all the time."""
    faulthandler.cancel_dump_traceback_later()


def remove_temporary_files(config: pytest.Config) -> None:
    """Have everything that tests, torch and examples leave in the temporary folder removed."""
    get_temp_dir()  # beside that folder: multiprocessing removes its own, after this
    folder = tempfile.TemporaryDirectory(prefix="gradkit-tests-", ignore_cleanup_errors=True)
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", folder.name)
    patch.setattr(tempfile, "tempdir", None)  # which it has read before
    config.add_cleanup(patch.undo)
    config.add_cleanup(folder.cleanup)


def pytest_report_header() -> list[str]:
    """Say what runs, and where the processes are: two of them cannot use NCCL on one GPU."""
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "optree": optree.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    kinds = {
        f"{size} ranks on {device_of_ranks(kind, size)}" for kind in DEVICES for size in (1, 2, 4)
    }
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [HEADER + shown, f"devices: {', '.join(DEVICES)}; {', '.join(sorted(kinds))}"]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that share processes together in one shard; those of four are slow."""
    for item in items:
        if "four" in processes_of(item):
            item.add_marker(pytest.mark.slow)
        for name in processes_of(item):
            # No group of pytest-xdist, each of whose workers starts processes of its own.
            item.add_marker(pytest.mark.processes(name))
    mark_unsupported(items, NOT_EMULATED)
    shard = Shard.parse(config.getoption("--shard"))
    config.hook.pytest_deselected(items=[item for item in items if item not in shard])
    items[:] = [item for item in items if item in shard]


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what is there before the first test: it stays."""
    gc.freeze()
    gc.enable()


def processes_of(item: pytest.Item) -> list[str]:
    """Return the fixture whose processes a test uses, if it uses one."""
    names = getattr(item, "fixturenames", ())
    if "several" in names:
        size = getattr(item, "callspec").params["several"]  # noqa: B009
        return [name for name, count in SIZES.items() if count == size]
    return [name for name in SIZES if name in names]


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
    destroy = dist.destroy_process_group
    kept: list[dist.ProcessGroup | None] = []

    def destroy_later(group: dist.ProcessGroup | None = None) -> None:
        last = group or dist.group.WORLD
        destroy(group)
        kept[:] = [last]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy_later)
        yield


@pytest.fixture(scope="session", autouse=True)
def _seeds_are_for_the_devices_that_are_here() -> Iterator[None]:
    """Spare torch.manual_seed a copy of the stack for each kind of device that may come later."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
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


@pytest.fixture(params=SIZES.values())
def several(request: pytest.FixtureRequest) -> Ranks:
    """Two processes, and four."""
    (name,) = (name for name, count in SIZES.items() if count == request.param)
    group: Ranks = request.getfixturevalue(name)
    return group
