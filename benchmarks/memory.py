"""How much memory a call takes at its peak: what the allocator handed out, and what that mapped."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Side

# For processes that measure resident pages: a freed tensor goes back to the system at once.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "16384"}


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes that a forward pass and the call on it took.

    Attributes:
        total: The most that tensors took at a time, over what stood before the forward pass.
        results: What the call's results take.
        resident: The most pages that the process had at a time, over those before the forward
            pass; None where it cannot be known.
    """

    total: int
    results: int
    resident: int | None = None

    @property
    def beyond(self) -> int:
        """What had to be there besides the results."""
        return self.total - self.results


def peak(side: Side, device: torch.device) -> Peak:
    """Return the peak of one forward pass and call, to the byte."""
    gc.collect()
    return _on_cuda(side, device) if device.type == "cuda" else _on_cpu(side)


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
    history = [
        (event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size)
        for event in events
        if event.tag.name == "Allocation"
    ]
    _, total, size = min(history)  # the counter goes on from the process's earlier profiles
    return Peak(max(total for _, total, _ in history) - (total - size), _bytes(results))


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


def resident_peak(side: Side) -> int | None:
    """Return by how many bytes the process's pages grew at most, or None where none can tell.

    That includes what the allocator does not see, such as Python's own objects.
    """
    if sys.platform != "linux":
        return None
    side.run(side.build())  # libraries set up memory of their own in the first call
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        return None
    before = _kilobytes("VmRSS")
    side.run(side.build())
    return (_kilobytes("VmHWM") - before) * 1024


def _kilobytes(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(entry)).split()[1])
