"""Ranks agree on what they are about to do before any gradient is sent."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradkit.errors import CollectiveError, GradkitError, StructureError, message, with_article

_T = TypeVar("_T")
Digest: TypeAlias = tuple[int, ...]
# The name, among the invariants, of what a rank has gathered and reduced between two calls.
PASSES = "the passes since the last call"
NO_DIGEST: Digest = (0, 0, 0, 0)
_FAILED = NO_DIGEST
_LONGEST = 200
_shape, _dtype, _device, _layout, _requires_grad = map(
    attrgetter, ("shape", "dtype", "device", "layout", "requires_grad")
)


class Group(NamedTuple):
    """A process group, and this process's rank in it."""

    handle: Any  # of torch.distributed
    call: str  # the public call, for errors
    rank: int
    size: int
    device: torch.device  # the device that sends the messages of agreements

    @property
    def this_rank(self) -> str:
        """Return the call and the rank, for errors."""
        return f"{self.call} on rank {self.rank} of {self.size}"


def require_group(handle: Any, call: str) -> Group:
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
    device = _device_of_messages(dist.get_backend_config(handle))
    return Group(handle, call, rank, dist.get_world_size(handle), device)


def _device_of_messages(config: str) -> torch.device:
    """Return the CPU if a group's backends serve it, else the current device of the first kind."""
    kinds = [part.partition(":")[0] for part in config.split(",")]  # as in "cpu:gloo,cuda:nccl"
    if "cpu" in kinds:
        return torch.device("cpu")
    index: int = torch.get_device_module(kinds[0]).current_device()
    return torch.device(kinds[0], index)


@contextmanager
def collective_errors(
    group: Group, *, backend_only: bool = False, what: str = ""
) -> Iterator[None]:
    """Raise CollectiveError for a RuntimeError in the block; `backend_only`: of the backend."""
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors.
        of_backend = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, GradkitError) or (backend_only and not of_backend):
            raise
        expected = "every rank of the group to take part, within the group's timeout"
        first_line = str(error).partition("\n")[0]
        got = f"{type(error).__name__}: {first_line}"
        fix = (
            "look for the first error in the output of the other ranks: one has raised, was "
            "killed, is too slow, or has made another call"
        )
        where = f"{what}, in {group.this_rank}" if what else group.this_rank
        raise CollectiveError(message(where, expected, got, fix)) from error


class GradSpec(NamedTuple):
    """The shape, dtype, device and layout of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    graph: bool  # whether it carries a graph, which the reduction continues
    layout: torch.layout
    dense_dim: int  # the number of dense dimensions of a sparse gradient

    @staticmethod
    def of(grad: Tensor | None, *, differentiable: bool = False) -> GradSpec | None:
        """Return the spec of a gradient, None for None."""
        if grad is None:
            return None
        dense_dim = grad.dense_dim() if grad.layout != torch.strided else 0
        graph = differentiable and grad.requires_grad
        shape = tuple(grad.shape)
        return GradSpec(shape, grad.dtype, grad.device.type, graph, grad.layout, dense_dim)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the dense gradient."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def local(self, grad: Tensor | None) -> Tensor:
        """Return a rank's gradient in this layout; zeros for None."""
        if grad is None:
            return self.zeros()
        if self.layout == torch.strided:
            return grad.to_dense() if grad.is_sparse else grad
        return grad if grad.is_sparse else grad.to_sparse(len(self.shape) - self.dense_dim)

    def zeros(self) -> Tensor:
        """Return a gradient of zeros."""
        # "cuda" without an index is the device that torch.cuda.set_device has chosen.
        if self.layout == torch.strided:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        split = len(self.shape) - self.dense_dim
        indices = torch.empty(split, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *self.shape[split:], dtype=self.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        graph = ", with a graph" if self.graph else ""
        return f"{with_article(kind)} tensor of shape {self.shape} on {self.device}{graph}"


# A description for each gradient, of one rank or agreed by all; None where there is none.
Specs: TypeAlias = tuple[GradSpec | None, ...]


def read_specs(grads: Sequence[Tensor | None], *, differentiable: bool = False) -> Specs:
    """Return the spec of each gradient."""
    present = [grad for grad in grads if grad is not None]
    if set(map(_layout, present)) != {torch.strided}:
        return tuple(GradSpec.of(grad, differentiable=differentiable) for grad in grads)
    # `map` over an attribute at a time: a Python loop would take longer than the reduction.
    columns = tuple(tuple(map(read, present)) for read in (_shape, _dtype, _device))
    graphs = tuple(map(_requires_grad, present)) if differentiable else ()
    absent = () if len(present) == len(grads) else tuple(grad is None for grad in grads)
    return _dense_specs(columns, graphs, absent)


@lru_cache(maxsize=256)
def _dense_specs(
    columns: tuple[tuple[Any, ...], ...], graphs: tuple[bool, ...], absent: tuple[bool, ...]
) -> Specs:
    count = len(columns[0])
    rows = zip(*columns, graphs or (False,) * count, strict=True)
    present = (
        GradSpec(tuple(shape), dtype, device.type, graph, torch.strided, 0)
        for shape, dtype, device, graph in rows
    )
    return tuple(None if none else next(present) for none in absent or (False,) * count)


# Facts that must be the same on all ranks, by name.
RankInvariants: TypeAlias = tuple[tuple[str, Hashable], ...]


class Description(NamedTuple):
    """What ranks compare, by a digest of its `repr`."""

    invariants: RankInvariants  # by name
    specs: Specs  # of the gradients
    paths: Callable[[], Iterable[str]]  # of the gradients, or other leaves, for errors
    expected: Digest = NO_DIGEST  # of the gradients that this rank expects, which may differ


class Agreement(NamedTuple):
    """What ranks have found out about each other."""

    specs: Specs  # of each gradient over all ranks
    expected: tuple[Digest, ...] = ()  # by rank, where descriptions agree

    @property
    def same_expected(self) -> bool:
        """Whether all ranks expect the same gradients."""
        return len(set(self.expected)) == 1


def agree_or_raise(
    group: Group, read: Callable[[], tuple[_T, Description]], *, same_reach: bool = False
) -> tuple[_T, Agreement]:
    """Return the checked input of `read`, and what ranks agree on."""
    # All ranks raise where one `read` does. `same_reach`: None on one rank must be None on all.
    with failures_reported(group):
        ours, description = read()
    compared = description.invariants, description.specs
    digest = digest_of(compared)
    messages = _exchange((*digest, *description.expected), group)
    digests = [other[: len(digest)] for other in messages]
    failed = [str(rank) for rank, other in enumerate(digests) if other == _FAILED]
    if failed:
        expected = "every rank of the group to take part"
        got = f"an error on rank {', '.join(failed)}, before any gradient was sent"
        fix = "look for it in the output of that rank"
        raise CollectiveError(message(group.this_rank, expected, got, fix))
    if all(other == digest for other in digests):
        return ours, Agreement(description.specs, tuple(m[len(digest) :] for m in messages))
    by_rank: list[Any] = [None] * group.size
    paths = list(description.paths())
    invariants = [(name, str(value)) for name, value in description.invariants]
    with collective_errors(group):
        sent = invariants, description.specs, paths
        dist.all_gather_object(by_rank, sent, group=group.handle)
    invariants_by_rank, specs, all_paths = zip(*by_rank, strict=True)
    _require_same_paths(group, all_paths)
    for name in dict(invariants_by_rank[0]):
        _require_same(group, name, [dict(other).get(name) for other in invariants_by_rank])
    columns = list(zip(paths, zip(*specs, strict=True), strict=False))
    common = tuple(_common_spec(group, path, column) for path, column in columns)
    for path, column in columns if same_reach else ():
        _require_same(group, path, ["none" if spec is None else "a gradient" for spec in column])
    return ours, Agreement(common)


def agree_in_all(
    groups: Sequence[Group], read: Callable[[], tuple[_T, Description]], *, same_reach: bool = False
) -> _T:
    """Return what `read` returns, agreed on in several groups; if one rank raises, all raise."""
    errors: list[Exception] = []
    results: list[tuple[_T, Description]] = []

    def read_once() -> tuple[_T, Description]:
        if errors:
            raise errors[0]
        if not results:
            results.append(read())
        return results[0]

    for group in groups:
        try:
            agree_or_raise(group, read_once, same_reach=same_reach)
        except Exception as error:  # raised below: the other groups must take part first
            errors.append(error)
    if errors:
        raise errors[0]
    return read_once()[0]  # no group means no parameter: `read` raises


def report_failure(group: Group) -> None:
    """Let the ranks that wait for this one in `agree_or_raise` raise."""
    with suppress(CollectiveError):
        _exchange((*_FAILED, *NO_DIGEST), group)


@contextmanager
def failures_reported(group: Group) -> Iterator[None]:
    """Let all ranks raise if the block raises on this one, before the next `agree_or_raise`."""
    try:
        yield
    except BaseException:
        report_failure(group)
        raise


def _exchange(sent: Digest, group: Group) -> list[Digest]:
    ours = torch.tensor(sent, dtype=torch.int64, device=group.device)
    gathered = [torch.empty_like(ours) for _ in range(group.size)]
    with collective_errors(group):
        dist.all_gather(gathered, ours, group=group.handle)
        return [tuple(other.tolist()) for other in gathered]


@lru_cache(maxsize=256)
def digest_of(description: Hashable) -> Digest:
    """Return a digest of the `repr` of a description."""
    return struct.unpack("<4q", hashlib.sha256(repr(description).encode()).digest())


def _require_same_paths(group: Group, by_rank: Sequence[Sequence[str]]) -> None:
    first = by_rank[0]
    for rank, paths in enumerate(by_rank):
        for owner, ours, other, theirs in ((0, first, rank, paths), (rank, paths, 0, first)):
            missing = [path for path in ours if path not in theirs]
            if missing:
                expected = f"a leaf, which rank {owner} has"
                _raise_difference(group, missing[0], other, expected, "nothing")


def _require_same(group: Group, name: str, by_rank: Sequence[object]) -> None:
    first = by_rank[0]
    for rank, value in enumerate(by_rank):
        if value != first:
            _raise_difference(group, name, rank, f"what rank 0 has, {_text(first)}", _text(value))


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
        if spec is None or spec[:4] != first[:4]:  # sparse ones can be added to dense ones
            expected = f"what rank {by_rank.index(first)} has, {first}"
            _raise_difference(group, path, rank, expected, str(spec))
    alike = all(spec == first for spec in present)
    return first if alike else first._replace(layout=torch.strided, dense_dim=0)


def _raise_difference(group: Group, what: str, rank: int, expected: str, got: str) -> NoReturn:
    """Raise the error of all ranks for what differs on one of them."""
    where = f"{what} on rank {rank} of {group.size} in {group.call}"
    fix = (
        "give every rank the same trees, and freeze the same parameters on all; None stands for a "
        "gradient that a rank does not have"
    )
    if what == PASSES:
        fix = "take the same gradients in the same order on every rank: theirs are of no use"
    raise StructureError(message(where, expected, got, fix))
