"""Times several ways of doing one thing: interleaved, each call on inputs of its own."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

Build = Callable[[], Any]
Run = Callable[[Any], object]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Side:
    """One way of doing the thing.

    Attributes:
        build: Makes fresh inputs, before the clock starts.
        run: Is timed on them.
    """

    build: Build
    run: Run


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one comparison goes on.

    Attributes:
        least: The least number of timed rounds.
        most: The largest.
        seconds: When to stop between the two; three times as long if the machine is busy.
        warmup: How many rounds go first, untimed.
    """

    least: int = 15
    most: int = 400
    seconds: float = 3.0
    warmup: int = 3

    def enough(self, calm: int, rounds: int, seconds: float) -> bool:
        """Return whether so many rounds, so many of them calm, in so many seconds will do."""
        if rounds < self.least:
            return False
        patience = self.seconds if calm >= self.least else 3 * self.seconds
        return calm >= self.most or seconds >= patience


@dataclass(frozen=True, slots=True)
class Timing:
    """What one side took, in nanoseconds, round by round."""

    samples: tuple[int, ...]

    @property
    def median(self) -> float:
        """The median, in nanoseconds."""
        return median(self.samples)

    def summary(self) -> dict[str, float]:
        """Return median and quartiles in microseconds, and the number of rounds."""
        low, high = quartiles(self.samples)
        return {
            "median_us": self.median / 1e3,
            "q1_us": low / 1e3,
            "q3_us": high / 1e3,
            "rounds": len(self.samples),
        }


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def ratios(ours: Timing, theirs: Timing) -> list[float]:
    """Return the ratio within each round, where both sides met the same weather."""
    return [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]


def differences(ours: Timing, theirs: Timing) -> list[int]:
    """Return by how many nanoseconds the first side was slower within each round."""
    return [a - b for a, b in zip(ours.samples, theirs.samples, strict=True)]


def measure(
    sides: Mapping[Name, Side], device: torch.device, effort: Effort = Effort()
) -> dict[Name, Timing]:
    """Time every side once a round until there are enough rounds.

    A round is void if the system took the processor away in one of its calls, as long as there are
    enough others. What a side leaves in the caches is what the next one finds there, and a third
    side costs the two others some percent: figures to be held against each other should be of two
    sides alone.

    Args:
        sides: The ways to compare.
        device: Where they run; it is waited for.
        effort: When to stop.

    Returns:
        One timing for each side, of equally many rounds.
    """
    every: list[dict[Name, int]] = []
    calm: list[dict[Name, int]] = []
    with _quiet():
        began = time.perf_counter()
        for turn in count(1):
            taken, interrupted = _round(sides, order(list(sides), turn), device)
            if turn <= effort.warmup:
                began = time.perf_counter()
                continue
            every.append(taken)
            calm += [] if interrupted else [taken]
            if effort.enough(len(calm), len(every), time.perf_counter() - began):
                break
    rounds = calm if len(calm) >= effort.least else every
    return {name: Timing(tuple(taken[name] for taken in rounds)) for name in sides}


def order(names: Sequence[Name], turn: int) -> list[Name]:
    """Return the order of a round: AB, BA, BA, AB, so that none always follows the same one."""
    shift = turn // 2 % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if turn % 2 else turned


def _round(
    sides: Mapping[Name, Side], names: Sequence[Name], device: torch.device
) -> tuple[dict[Name, int], bool]:
    """Return the nanoseconds of each side, and whether any of them was interrupted."""
    taken: dict[Name, int] = {}
    interruptions = 0
    for name in names:
        taken[name], further = _time_once(sides[name], device)
        interruptions += further
    # What this round made, and no more, which would cool the caches: or cycles, if a side leaves
    # any, would hold memory through the later rounds.
    gc.collect(0)
    return taken, interruptions > 0


def _time_once(side: Side, device: torch.device) -> tuple[int, int]:
    inputs = side.build()
    synchronize(device)
    before = _interruptions()
    start = time.perf_counter_ns()
    result = side.run(inputs)
    synchronize(device)
    stop = time.perf_counter_ns()
    further = _interruptions() - before
    del result, inputs  # not before the clock has stopped: freeing a graph takes its time, too
    return stop - start, further


def _interruptions() -> int:
    """Return how often the system has taken the processor from this thread; 0 if it cannot say."""
    if sys.platform != "linux":
        return 0
    import resource  # no other system needs to have it

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    collected = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()  # what exists now need not be looked at in the collection after each round
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
        if collected:
            gc.enable()


def keep_heap() -> bool:
    """Let freed memory stay with this process, so that no side pays for the other's page faults.

    Without it, one and the same call differs from itself by 5 % where results take megabytes; with
    it, by less than 1 %. It cannot be undone.

    Returns:
        Whether this system's C library can do it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    return bool(mallopt(mmap_threshold, 1 << 30)) and bool(mallopt(trim_threshold, (1 << 31) - 1))
