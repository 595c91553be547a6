"""Times several ways of doing one thing: interleaved, each call on inputs of its own.

On the CPU, time is what the processor spent on this thread, where all of a call runs: what others
do with the processor does not count, though what they leave in the caches does. On CUDA it is what
passed until the device had finished. What stands for a side is its first quartile: the slower
rounds are those that met something else.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import quantiles
from typing import Any, TypeVar

import torch

Build = Callable[[], Any]
Run = Callable[[Any], object]
Clock = Callable[[], int]
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
        seconds: When to stop between the two, by the clock on the wall, inputs included.
        warmup: How many rounds go first, untimed.
    """

    least: int = 15
    most: int = 300
    seconds: float = 1.0
    warmup: int = 3

    def enough(self, rounds: int, seconds: float) -> bool:
        """Return whether so many rounds in so many seconds will do."""
        return rounds >= self.least and (rounds >= self.most or seconds >= self.seconds)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one side took, in nanoseconds, round by round."""

    samples: tuple[int, ...]

    @property
    def typical(self) -> float:
        """The first quartile, in nanoseconds: what stands for the side."""
        return quartiles(self.samples)[0]

    def summary(self) -> dict[str, float]:
        """Return the quartiles in microseconds, and the number of rounds."""
        low, high = quartiles(self.samples)
        return {"q1_us": low / 1e3, "q3_us": high / 1e3, "rounds": len(self.samples)}


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def ratio(ours: Timing, theirs: Timing) -> float:
    """Return the ratio of the first quartiles."""
    return ours.typical / theirs.typical


def ratios(ours: Timing, theirs: Timing) -> list[float]:
    """Return the ratio within each round, where both sides met the same weather."""
    return [a / b for a, b in zip(ours.samples, theirs.samples, strict=True)]


def measure(
    sides: Mapping[Name, Side],
    device: torch.device,
    effort: Effort = Effort(),
    clock: Clock | None = None,
) -> dict[Name, Timing]:
    """Time every side once a round until there are enough rounds.

    What a side leaves in the caches is what the next one finds there, and a third side costs the
    two others some percent: figures to be held against each other should be of two sides alone.

    Args:
        sides: The ways to compare.
        device: Where they run; it is waited for.
        effort: When to stop.
        clock: Gives nanoseconds. None is this thread's processor time, and on CUDA the time that
            passes; `time.process_time_ns` is for calls that other threads work for.

    Returns:
        One timing for each side, of equally many rounds.
    """
    clock = clock or clock_for(device)
    rounds: list[dict[Name, int]] = []
    with _quiet():
        began = time.perf_counter()
        for turn in count(1):
            taken = _round(sides, order(list(sides), turn), device, clock)
            if turn <= effort.warmup:
                began = time.perf_counter()
                continue
            rounds.append(taken)
            if effort.enough(len(rounds), time.perf_counter() - began):
                break
    return {name: Timing(tuple(taken[name] for taken in rounds)) for name in sides}


def clock_for(device: torch.device) -> Clock:
    """Return the clock for calls that run in one thread."""
    return time.perf_counter_ns if device.type == "cuda" else time.thread_time_ns


def order(names: Sequence[Name], turn: int) -> list[Name]:
    """Return the order of a round: AB, BA, BA, AB, so that none always follows the same one."""
    shift = turn // 2 % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if turn % 2 else turned


def _round(
    sides: Mapping[Name, Side], names: Sequence[Name], device: torch.device, clock: Clock
) -> dict[Name, int]:
    """Return the nanoseconds of each side."""
    taken = {name: _time_once(sides[name], device, clock) for name in names}
    # What this round made, and no more, which would cool the caches: or cycles, if a side leaves
    # any, would hold memory through the later rounds.
    gc.collect(0)
    return taken


def _time_once(side: Side, device: torch.device, clock: Clock) -> int:
    inputs = side.build()
    synchronize(device)
    start = clock()
    result = side.run(inputs)
    synchronize(device)
    stop = clock()
    del result, inputs  # not before the clock has stopped: freeing a graph takes its time, too
    return stop - start


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
