"""How much memory a call takes at its peak: what the allocator handed out."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import optree
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Side
from benchmarks.row import Row, Want


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes that a forward pass and the call on it took.

    Attributes:
        total: The most that tensors took at a time, over what stood before the forward pass.
        results: What the call's results take.
    """

    total: int
    results: int

    @property
    def beyond(self) -> int:
        """What had to be there besides the results."""
        return self.total - self.results


def peak(side: Side, device: torch.device) -> Peak:
    """Return the peak of one forward pass and call, to the byte."""
    gc.collect()
    return _on_cuda(side, device) if device.type == "cuda" else _on_cpu(side)


def row(what: str, against: str, ours: Peak, theirs: Peak, limit: float | None) -> Row:
    """Return the row for the peaks of two sides, held against a ratio."""
    ratio = ours.total / theirs.total
    return Row(
        what=f"{what}, peak memory",
        against=against,
        ours=ours.total / 1e6,
        theirs=theirs.total / 1e6,
        unit="MB",
        ratio=ratio,
        figure=ratio,
        want=None if limit is None else Want(limit),
        details={"gradkit": asdict(ours), "theirs": asdict(theirs)},
    )


def _on_cuda(side: Side, device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = side.run(side.build())
    torch.cuda.synchronize(device)
    return Peak(torch.cuda.max_memory_allocated(device) - before, _bytes(results))


def _on_cpu(side: Side) -> Peak:
    # `acc_events`: torch 2.11 warns without it.
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        results = side.run(side.build())
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = _walk(profiler.profiler.kineto_results.experimental_event_tree())
    history = sorted(
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in events
        if event.tag.name == "Allocation"
    )
    return Peak(largest_total((ptr, size) for _, ptr, size in history), _bytes(results))


def largest_total(history: Iterable[tuple[int, int]]) -> int:
    """Return the most bytes that stood at a time, of allocations and, with a minus, frees."""
    sizes: dict[int, int] = {}
    starts: list[int] = []
    total = most = 0

    def free(index: int) -> int:
        return sizes.pop(starts.pop(index))

    for start, size in history:
        if size < 0:
            total -= free(bisect_left(starts, start)) if start in sizes else 0
            continue
        # The profiler does not see what threads of gloo free, and its own total counts it for ever.
        # It is free when another tensor lies there.
        index = bisect_left(starts, start)
        if index and starts[index - 1] + sizes[starts[index - 1]] > start:
            index -= 1
        while index < len(starts) and starts[index] < start + size:
            total -= free(index)
        starts.insert(index, start)
        sizes[start] = size
        total += size
        most = max(most, total)
    return most


def _walk(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children


def _bytes(tree: Any) -> int:
    leaves = optree.tree_leaves(tree)
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
