"""Sweeps torch: `python -m tests.sweep [--count 5] [--order 3] [--only det solve] [--write]`.

With `--points` it tries the first and the second derivative at degenerate points.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import torch

from tests.sweep import findings, table
from tests.sweep.cases import Make, modules, operations
from tests.sweep.degenerate import at_limits
from tests.sweep.extra import extra
from tests.sweep.programs import Case, kinds, verdicts_of

LONGEST = 20  # seconds for the cases of one operation
Result = tuple[str, str, dict[str, str], dict[int, set[str]]]  # operation, case, verdicts, nodes


def everything() -> Iterator[tuple[str, Make]]:
    """Yield all that is swept."""
    for name, case in extra().items():
        yield name, partial(_one, case)
    yield from chain(operations(), modules())


def judge(case: Case, order: int) -> tuple[dict[str, str], dict[int, set[str]]]:
    """Return the verdicts on a case, and the kinds of nodes of each eager derivative."""
    verdicts = verdicts_of(case, order)
    tried = [n for n in range(1, order + 1) if verdicts.get(f"eager {n}") in {"right", "wrong"}]
    return verdicts, {n: kinds(case, n - 2) if n > 1 else set() for n in tried}


def sweep(order: int, count: int, part: tuple[str, Make]) -> list[Result]:
    """Return the verdicts on the cases of one operation."""
    name, make = part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: list[Result] = []
    start = time.monotonic()
    try:
        for index, case in enumerate(make(count)):
            # The third derivative takes most of the time.
            here = order if index < 2 else min(order, 2)
            results.append((case.operation, f"{name}, {index}", *judge(case, here)))
            if time.monotonic() - start > LONGEST:
                break
    except Exception as error:
        print(f"{name}: not swept: {type(error).__name__}: {str(error)[:100]}")
    return results


def main() -> None:
    """Sweep, print what is wrong or not finite, and write the table if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--order", type=int, default=3, help="the highest derivative")
    parser.add_argument("--count", type=int, default=5, help="the calls of each operation")
    parser.add_argument("--only", nargs="+", help="operations, or the beginnings of their names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write gradkit's table")
    parser.add_argument("--points", action="store_true", help="try degenerate points")
    parser.add_argument("--seconds", type=float, default=15, help="for the points of an operation")
    options = parser.parse_args()
    begins = tuple(options.only or [""])
    parts = [part for part in everything() if part[0].startswith(begins)]
    global _PARTS
    _PARTS = parts
    if options.points:
        at_degenerate_points(options)
        return
    found = table.Found()
    run = partial(_numbered, options.order, options.count)
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for results in pool.imap(run, range(len(parts))):
            for operation, name, verdicts, nodes in results:
                found.add(operation, verdicts, nodes)
                bad = [f"{k}: {v}" for k, v in verdicts.items() if v in {"wrong", "not finite"}]
                if bad:
                    print(f"{name} | {'; '.join(bad)}", flush=True)
    print(f"\ntorch {torch.__version__}: {len(parts)} operations and modules")
    for name, stacks in found.operations().items():
        print(f"{name}: {', '.join(stacks)}")
    print(found.kinds())
    if options.write:
        table.write(found, everything=not options.only)


def at_degenerate_points(options: argparse.Namespace) -> None:
    """Sweep degenerate points, print what is not right, and how much was tried."""
    _PARTS.extend((name, partial(_one, case)) for name, case in at_limits().items())
    found = findings.Found()
    run = partial(_at_points, options.count, options.seconds)
    with ThreadPoolExecutor(options.processes) as pool:
        each = pool.map(partial(_in_a_process, run), range(len(_PARTS)))
        for (name, _), one in zip(_PARTS, each, strict=True):
            if one is None:
                print(f"{name}: torch has ended the process", flush=True)
                continue
            found.add(one)
            for line in findings.lines(name, one.findings):
                print(line, flush=True)
    print(f"\ntorch {torch.__version__}: {found}")


def _one(case: Case, _: int) -> list[Case]:
    return [case]


def _in_a_process(run: Callable[[int], findings.Found], index: int) -> findings.Found | None:
    """Return a result from a process of its own, None if that ended: empty tensors crash torch."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(run(index)))
    process.start()
    sender.close()
    try:
        result: findings.Found = receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return result


def _at_points(count: int, seconds: float, index: int) -> findings.Found:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return findings.at_points(_PARTS[index][1](count), seconds=seconds)


_PARTS: list[tuple[str, Make]] = []


def _numbered(order: int, count: int, index: int) -> list[Result]:
    return sweep(order, count, _PARTS[index])


if __name__ == "__main__":
    main()
