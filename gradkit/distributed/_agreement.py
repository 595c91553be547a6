"""Ranks agree on what they are about to do before any gradient is sent.

A collective hangs, or mixes up memory, if its ranks send different shapes. So each rank first sends
a digest of fixed size. If digests differ, the ranks exchange descriptions and all raise the same
error; if one rank has failed, the others raise at once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gradkit.distributed._grad_spec import GradSpec
from gradkit.distributed._group import Group, collective_errors
from gradkit.errors import CollectiveError, StructureError, message

_T = TypeVar("_T")
_FAILED = (0, 0, 0, 0)
_LONGEST = 200


def agree_or_raise(
    group: Group,
    read: Callable[[], tuple[_T, Hashable]],
    paths: Callable[[_T], tuple[str, ...]],
) -> tuple[_T, list[tuple[Any, Any]] | None]:
    """Return the input, and None, or all ranks' descriptions with paths if these differ."""
    # `read` returns the checked input and its description, `(names and values, specs)`, of which
    # the ranks compare the `repr`. Where it raises, all ranks raise.
    try:
        ours, description = read()
    except BaseException:
        with suppress(CollectiveError):
            _exchange(_FAILED, group)
        raise
    digest = _digest(description)
    digests = _exchange(digest, group)
    failed = [str(rank) for rank, other in enumerate(digests) if other == _FAILED]
    if failed:
        expected = "every rank of the group to take part"
        got = f"an error on rank {', '.join(failed)}, before any gradient was sent"
        fix = "look for it in the output of that rank"
        raise CollectiveError(message(group.this_rank, expected, got, fix))
    if all(other == digest for other in digests):
        return ours, None
    descriptions: list[Any] = [None] * group.size
    with collective_errors(group):
        dist.all_gather_object(descriptions, (description, paths(ours)), group=group.handle)
    return ours, descriptions


def _exchange(digest: Sequence[int], group: Group) -> list[tuple[int, ...]]:
    ours = torch.tensor(digest, dtype=torch.int64, device=group.device)
    gathered = [torch.empty_like(ours) for _ in range(group.size)]
    with collective_errors(group):
        dist.all_gather(gathered, ours, group=group.handle)
        return [tuple(other.tolist()) for other in gathered]


@lru_cache(maxsize=256)
def _digest(description: Hashable) -> tuple[int, ...]:
    return struct.unpack("<4q", hashlib.sha256(repr(description).encode()).digest())


def common_specs(
    group: Group, descriptions: Sequence[tuple[Any, Any]], path: Callable[[int], str]
) -> list[GradSpec | None]:
    """Return the spec of each gradient over all ranks; raise if the ranks' trees do not match."""
    _require_same_paths(group, [paths for _, paths in descriptions])
    structures = [dict(structure) for (structure, _), _ in descriptions]
    for name in structures[0]:
        _require_same(group, name, [structure.get(name) for structure in structures])
    columns = zip(*(specs for (_, specs), _ in descriptions), strict=True)
    return [_common_spec(group, path(index), column) for index, column in enumerate(columns)]


def _require_same_paths(group: Group, by_rank: Sequence[Sequence[str]]) -> None:
    for rank, paths in enumerate(by_rank):
        _require_paths(group, by_rank[0], 0, paths, rank)
        _require_paths(group, paths, rank, by_rank[0], 0)


def _require_paths(
    group: Group, paths: Sequence[str], rank: int, others: Sequence[str], other: int
) -> None:
    missing = [path for path in paths if path not in others]
    if missing:
        expected = f"a leaf, which rank {rank} has"
        raise_difference(group, missing[0], other, expected, "nothing")


def _require_same(group: Group, name: str, by_rank: Sequence[object]) -> None:
    first = by_rank[0]
    for rank, value in enumerate(by_rank):
        if value != first:
            raise_difference(group, name, rank, f"what rank 0 has, {_text(first)}", _text(value))


def raise_difference(group: Group, what: str, rank: int, expected: str, got: str) -> NoReturn:
    """Raise the error of all ranks for what differs on one of them."""
    where = f"{what} on rank {rank} of {group.size} in {group.call}"
    fix = "give every rank the same trees; None stands for a gradient that a rank does not have"
    raise StructureError(message(where, expected, got, fix))


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _common_spec(group: Group, path: str, by_rank: Sequence[GradSpec | None]) -> GradSpec | None:
    present = [spec for spec in by_rank if spec is not None]
    if not present:
        return None
    first = present[0]
    for rank, spec in enumerate(by_rank):
        # A backward pass through the reduction waits for all ranks, also for one without a graph.
        if spec is None and not first.graph:
            continue
        if spec is None or not spec.adds_to(first):
            expected = f"what rank {by_rank.index(first)} has, {first}"
            raise_difference(group, path, rank, expected, str(spec))
    return first if all(spec == first for spec in present) else first.as_dense()
