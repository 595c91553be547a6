"""Collectives that name themselves when they fail, and agreement between ranks before them.

A collective in which ranks take part with different things hangs, or mixes up memory. So before
any gradient is sent, every rank sends a digest of what it is about to do, of fixed size: where they
differ, all ranks learn how, and all raise the same error; where one has already failed, the others
hear of it at once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit.errors import CollectiveError, GradkitError, StructureError, message


class Group(NamedTuple):
    """A process group, and who this process is in it.

    Attributes:
        handle: What torch.distributed calls a group.
        call: The public call that uses it, for errors.
        rank: This process's rank in it.
        size: How many ranks there are.
        device: Where small messages can be sent from.
    """

    handle: Any
    call: str
    rank: int
    size: int
    device: torch.device


def join(handle: Any, call: str) -> Group:
    """Return a group that this process belongs to.

    Args:
        handle: A process group; None is the default one.
        call: The public call that uses it.

    Returns:
        The group.

    Raises:
        CollectiveError: There is none, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise CollectiveError(
            message(
                call,
                "a process group",
                "none: torch.distributed is not initialized",
                "start the script with torchrun, and call torch.distributed.init_process_group()",
            )
        )
    handle = dist.group.WORLD if handle is None else handle
    rank = dist.get_rank(handle)
    if rank < 0:
        raise CollectiveError(
            message(
                call,
                "a process group that this process is in",
                f"one that rank {dist.get_rank()} is not in, for which torch does nothing",
                "make the call on the ranks of the group only",
            )
        )
    on_cpu = "cpu" in dist.get_backend_config(handle)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    return Group(handle, call, rank, dist.get_world_size(handle), device)


@contextmanager
def named(group: Group, *, backend_only: bool = False) -> Iterator[None]:
    """Give the backend's errors inside the block the name of the call, and say what they mean.

    Args:
        group: The group whose collectives run in the block.
        backend_only: The block runs other things, too, whose errors are to stay.

    Raises:
        CollectiveError: A rank did not take part.
        RuntimeError: What has another reason.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GradkitError) or (backend_only and not _is_of_backend(error)):
            raise
        reason = str(error).partition("\n")[0]
        raise CollectiveError(
            message(
                f"{group.call} on rank {group.rank} of {group.size}",
                "every rank of the group to take part, within the group's timeout",
                f"{type(error).__name__}: {reason}",
                "look for the first error in the output of the other ranks: one has raised, was "
                "killed, is too slow, or has made another call",
            )
        ) from error


def _is_of_backend(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors.
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def agree_or_raise(
    group: Group, read: Callable[[], Hashable], explain: Callable[[], object]
) -> list[tuple[Any, Any]] | None:
    """Learn whether all ranks are about to do the same.

    Args:
        group: The ranks.
        read: Describes what this rank is about to do, by a value that `repr` tells apart and that
            is hashable; or raises.
        explain: Adds what only an error needs.

    Returns:
        None if all ranks have described the same, otherwise what each has described, explained.

    Raises:
        BaseException: What `read` has raised.
        CollectiveError: Another rank's `read` has raised.
    """
    try:
        mine = read()
    except BaseException:
        with suppress(CollectiveError):
            _exchange(_FAILED, group)
        raise
    digest = _digest(mine)
    everyone = _exchange(digest, group)
    failed = [rank for rank, theirs in enumerate(everyone) if theirs == _FAILED]
    if failed:
        raise CollectiveError(
            message(
                f"{group.call} on rank {group.rank} of {group.size}",
                "every rank of the group to take part",
                f"an error on rank {', '.join(map(str, failed))}, before any gradient was sent",
                "look for it in the output of that rank",
            )
        )
    if all(theirs == digest for theirs in everyone):
        return None
    described: list[Any] = [None] * group.size
    with named(group):
        dist.all_gather_object(described, (mine, explain()), group=group.handle)
    return described


def _exchange(digest: Sequence[int], group: Group) -> list[tuple[int, ...]]:
    mine = torch.tensor(digest, dtype=torch.int64, device=group.device)
    everyone = [torch.empty_like(mine) for _ in range(group.size)]
    with named(group):
        dist.all_gather(everyone, mine, group=group.handle)
        return [tuple(theirs.tolist()) for theirs in everyone]


@lru_cache(maxsize=256)
def _digest(described: Hashable) -> tuple[int, ...]:
    return struct.unpack("<4q", hashlib.sha256(repr(described).encode()).digest())


_FAILED = (0, 0, 0, 0)


class Leaf(NamedTuple):
    """What ranks must have in common about one gradient.

    Attributes:
        graph: It carries a graph that is to go on through the reduction.
        dense_dim: Of a sparse gradient, as torch calls it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    graph: bool
    layout: torch.layout
    dense_dim: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what cannot differ between ranks; a sparse gradient can be made dense."""
        return self[:4]


def leaf_of(grad: Tensor | None, *, differentiable: bool = False) -> Leaf | None:
    """Describe a gradient for the other ranks.

    Args:
        grad: A gradient.
        differentiable: The reduction is to be differentiated.

    Returns:
        Its description; None for none.
    """
    if grad is None:
        return None
    dense_dim = grad.dense_dim() if grad.layout != torch.strided else 0
    graph = differentiable and grad.requires_grad
    return Leaf(tuple(grad.shape), grad.dtype, grad.device.type, graph, grad.layout, dense_dim)


def agreed_leaves(
    group: Group, theirs: Sequence[tuple[Any, Any]], path: Callable[[int], str]
) -> list[Leaf | None]:
    """Return what each gradient is on all ranks together, where ranks have described different.

    Args:
        group: The ranks.
        theirs: For each rank `((structure, leaves), paths)`: what must be the same, by name; its
            gradients; and the ways to them.
        path: Tells the way to a gradient.

    Returns:
        For each gradient None if no rank has one; else what it is, dense if one rank has it dense.

    Raises:
        StructureError: The ranks have trees or gradients that do not go together.
    """
    _require_same_paths(group, [paths for _, paths in theirs])
    for name, *_ in theirs[0][0][0]:
        _require_same(group, name, [dict(structure).get(name) for (structure, _), _ in theirs])
    columns = zip(*(leaves for (_, leaves), _ in theirs), strict=True)
    return [_agreed_leaf(group, path(index), column) for index, column in enumerate(columns)]


def _require_same_paths(group: Group, theirs: Sequence[Sequence[str]]) -> None:
    for rank, paths in enumerate(theirs):
        for one, other, has_it in ((0, rank, theirs[0]), (rank, 0, paths)):
            missing = [path for path in has_it if path not in theirs[other]]
            if missing:
                refuse(group, missing[0], other, f"a leaf, which rank {one} has", "nothing")


def _require_same(group: Group, what: str, theirs: Sequence[object]) -> None:
    for rank, one in enumerate(theirs):
        if one != theirs[0]:
            refuse(group, what, rank, f"what rank 0 has, {_shown(theirs[0])}", _shown(one))


def refuse(group: Group, what: str, rank: int, expected: str, got: str) -> NoReturn:
    raise StructureError(
        message(
            f"{what} on rank {rank} of {group.size} in {group.call}",
            expected,
            got,
            "give every rank the same trees; None stands for a gradient that a rank does not have",
        )
    )


def _shown(value: object) -> str:
    if isinstance(value, Leaf):
        kind = str(value.dtype).removeprefix("torch.")
        graph = ", with a graph" if value.graph else ""
        return f"a {kind} tensor of shape {value.shape} on {value.device}{graph}"
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


_LONGEST = 200


def _agreed_leaf(group: Group, path: str, theirs: Sequence[Leaf | None]) -> Leaf | None:
    present = [leaf for leaf in theirs if leaf is not None]
    if not present:
        return None
    first = present[0]
    for rank, leaf in enumerate(theirs):
        # A backward pass through the reduction waits for all ranks, also for one without a graph.
        if leaf is None and not first.graph:
            continue
        if leaf is None or leaf.kind != first.kind:
            where = theirs.index(first)
            refuse(group, path, rank, f"what rank {where} has, {_shown(first)}", _shown(leaf))
    alike = all(leaf == first for leaf in present)
    return first if alike else first._replace(layout=torch.strided, dense_dim=0)
