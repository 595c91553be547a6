"""A process group, and errors of its collectives that name the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradkit.errors import CollectiveError, GradkitError, message


class Group(NamedTuple):
    """A process group, and this process's rank in it."""

    handle: Any  # of torch.distributed
    call: str  # the public call, for errors
    rank: int
    size: int
    device: torch.device  # that small messages are sent from

    @property
    def this_rank(self) -> str:
        """Return the call and the rank, for errors."""
        return f"{self.call} on rank {self.rank} of {self.size}"


def join_group(handle: Any, call: str) -> Group:
    """Return the group of a handle, None for the default one; raise if this process has no part."""
    if not dist.is_available() or not dist.is_initialized():
        got = "none: torch.distributed is not initialized"
        fix = "start the script with torchrun, and call torch.distributed.init_process_group()"
        raise CollectiveError(message(call, "a process group", got, fix))
    handle = dist.group.WORLD if handle is None else handle
    rank = dist.get_rank(handle)
    if rank < 0:
        expected = "a process group that this process is in"
        got = f"one that rank {dist.get_rank()} is not in, for which torch does nothing"
        fix = "make the call on the ranks of the group only"
        raise CollectiveError(message(call, expected, got, fix))
    on_cpu = "cpu" in dist.get_backend_config(handle)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    return Group(handle, call, rank, dist.get_world_size(handle), device)


@contextmanager
def collective_errors(group: Group, *, backend_only: bool = False) -> Iterator[None]:
    """Raise CollectiveError for a RuntimeError in the block; `backend_only`: of the backend."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors.
        of_backend = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, GradkitError) or (backend_only and not of_backend):
            raise
        expected = "every rank of the group to take part, within the group's timeout"
        reason = str(error).partition("\n")[0]
        fix = (
            "look for the first error in the output of the other ranks: one has raised, was "
            "killed, is too slow, or has made another call"
        )
        got = f"{type(error).__name__}: {reason}"
        raise CollectiveError(message(group.this_rank, expected, got, fix)) from error
