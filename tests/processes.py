"""Worker processes that run functions as the ranks of a process group."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.accelerator import emulation

PATIENCE = 900  # seconds until a rank that does not answer counts as hanging
TIMEOUT = 60  # seconds until a collective in which a rank is missing fails


# What a server has imported once, so that the processes it forks need not: seconds for each.
PRELOADED = [
    "pytest", "hypothesis", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "gradkit.distributed",
]  # fmt: skip


def forking() -> Any:
    """Return the context of processes that start at once; the seed of `hash` is one for all."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def device_of_ranks(kind: str, size: int) -> str:
    """Return the kind of device that so many ranks use: NCCL needs a GPU for each of them.

    With fewer they are on the CPU, as gloo has only some of the collectives for CUDA tensors. So
    they are where the accelerator is emulated, which has none.
    """
    if emulation.KIND or (kind == "cuda" and torch.cuda.device_count() < size):
        return "cpu"
    return kind


class Ranks:
    """The processes of one group; its functions are called with the device, and arguments."""

    def __init__(
        self, size: int, device: torch.device, timeout: float = TIMEOUT, context: Any = None
    ) -> None:
        self.size = size
        self._options = device_of_ranks(device.type, size), timeout
        # As a user's ranks: each is a process from its start, with a seed of `hash` of its own.
        self._context = context or mp.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = self._context
        pairs = [context.Pipe() for _ in range(self.size)]
        self._connections = [ours for ours, _ in pairs]
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, self.size, rendezvous, *self._options, theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of a test module on every rank, and return what each returned.

        An error on a rank fails the test, with its traceback.
        """
        answers = self.outcomes(function, *args)
        failed = {rank: text for rank, (kind, text) in enumerate(answers) if kind != "returned"}
        if failed:
            # For the tests that follow: their messages could meet those that are left in the group.
            self.stop()
            self._start()
            lines = "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise AssertionError(f"{len(failed)} of {self.size} ranks failed\n{lines}")
        return [value for _, value in answers]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """Call a function on every rank, and return the outcome of each.

        An outcome is ("returned", value), ("raised", traceback), ("died", None) or ("hung", None).
        """
        task = pickle.dumps((function, args))
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(task)
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[str, Any]:
        connection = self._connections[rank]
        if not connection.poll(PATIENCE):
            self.stop()
            return "hung", None
        try:
            answer: tuple[str, Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return "died", None
        return answer

    def stop(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.terminate()  # at which coverage writes down what it has seen
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        self._folder.cleanup()


@contextlib.contextmanager
def ranks(
    size: int, device: torch.device, timeout: float = TIMEOUT, context: Any = None
) -> Iterator[Ranks]:
    """Start processes for the block."""
    group = Ranks(size, device, timeout, context)
    try:
        yield group
    finally:
        group.stop()


def _serve(
    rank: int, size: int, rendezvous: str, kind: str, timeout: float, connection: Connection
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own: the parent sees gradkit's
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    device = torch.device(kind)
    backend = "gloo"
    if kind == "cuda":
        device = torch.device(kind, rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, rendezvous, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout)
    )
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = "returned", function(device, *args)
        except BaseException:
            answer = "raised", traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
