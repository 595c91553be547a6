"""Processes that run programs by number: one that dies or hangs is a result as well."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

from tests.fuzz.rooms import ROOMS
from tests.fuzz.runs import WRONG, Outcome, Summary, run, set_up

Run: TypeAlias = Callable[[int, int], Outcome]  # of a seed and a number
LONGEST_START = 300.0  # seconds
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Plan:
    """Which programs to run, and how long one may take: it takes milliseconds."""

    seed: int = 0
    rooms: Sequence[str] = tuple(ROOMS)
    seconds: float = float("inf")
    end: float = float("inf")  # the number of the first program that is not run
    jobs: int = 1
    hangs: float = 120.0
    runner: Run = run

    def numbers(self, share: int, after: int = -1) -> Iterator[int]:
        """Yield the numbers of a process: each has rounds of its own, of all rooms."""
        indices = [index for index, name in enumerate(ROOMS) if name in self.rooms]
        for turn in count(share, self.jobs):
            for number in (turn * len(ROOMS) + index for index in indices):
                if number >= self.end:
                    return
                if number > after:
                    yield number


def work(pipe: Connection, plan: Plan, share: int, after: int) -> None:
    """Run programs in a process, and say of each that it starts, and what came of it."""
    set_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the process that prints the summary
    for number in plan.numbers(share, after):
        pipe.send(number)
        pipe.send(plan.runner(plan.seed, number))


class Job:
    """A process, and the program that it runs."""

    def __init__(self, plan: Plan, share: int, after: int = -1) -> None:
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        self.share = share
        self.number: int | None = None
        self.since = time.monotonic()
        self.process = SPAWN.Process(target=work, args=(theirs, plan, share, after), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Outcome | None:
        """Read what the process says; raise EOFError once it has ended."""
        said: int | Outcome = self.pipe.recv()
        self.since = time.monotonic()
        self.number = None if isinstance(said, Outcome) else said
        return said if isinstance(said, Outcome) else None

    def stop(self) -> int | None:
        """End the process, and return its exit code."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


@contextmanager
def started(plan: Plan) -> Iterator[list[Job]]:
    jobs = [Job(plan, share) for share in range(plan.jobs)]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.stop()


def fuzz(plan: Plan) -> Summary:
    """Run the programs of a plan until its time is up, none is left, or it is interrupted."""
    summary, deadline, has_begun = Summary(), time.monotonic() + LONGEST_START, False
    with suppress(KeyboardInterrupt), started(plan) as jobs:
        while jobs and time.monotonic() < deadline:
            ready = wait([job.pipe for job in jobs], timeout=1)
            for job in list(jobs):
                if job.pipe in ready:
                    take(job, jobs, plan, summary)
                    if not has_begun:  # a process takes seconds to start
                        has_begun, deadline = True, time.monotonic() + plan.seconds
                elif job.number is not None and time.monotonic() - job.since > plan.hangs:
                    end(job, jobs, plan, summary, "it did not end")
    return summary


def take(job: Job, jobs: list[Job], plan: Plan, summary: Summary) -> None:
    """Count what a process says, or that it has died."""
    try:
        outcome = job.receive()
    except EOFError:
        job.process.join()
        end(job, jobs, plan, summary, f"its process died, with exit code {job.process.exitcode}")
        return
    if outcome is not None:
        summary.add(outcome)


def end(job: Job, jobs: list[Job], plan: Plan, summary: Summary, reason: str) -> None:
    """Take a process out; if it was in a program, that was wrong, and another goes on after it."""
    code = job.stop()
    jobs.remove(job)
    if job.number is None and code:
        raise RuntimeError(f"a process ended before its next program, with exit code {code}")
    if job.number is not None:
        summary.add(Outcome(job.number, WRONG, reason))
        jobs.append(Job(plan, job.share, job.number))
