"""The comparisons by room, each room in a process of its own.

What a room registers or defines (a hook, a custom Function, a compiled module) changes what every
later call of its process costs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import (
    applying,
    batching,
    calling,
    clipping,
    combining,
    compiling,
    fresh,
    functions,
    growth,
    guarded,
    heap,
    importing,
    inner,
    instructions,
    losses,
    optimizing,
    peaks,
    processes,
    retaining,
    samples,
    sharding,
    staging,
    stepping,
    streaming,
    tasks,
    tracing,
    training,
    unrolling,
    values,
)
from benchmarks.plan import Plan
from benchmarks.row import Row

# In the order of docs/performance.md; if time runs out, it is the last that are left out.
ROOMS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "training": training.rows,
    "heap": heap.rows,
    "values": values.rows,
    "guarded": guarded.rows,
    "inner": inner.rows,
    "losses": losses.rows,
    "batching": batching.rows,
    "functions": functions.rows,
    "calling": calling.rows,
    "retaining": retaining.rows,
    "stepping": stepping.rows,
    "applying": applying.rows,
    "processes": processes.rows,
    "sharding": sharding.rows,
    "unrolling": unrolling.rows,
    "tasks": tasks.rows,
    "optimizing": optimizing.rows,
    "importing": importing.rows,
    "peaks": peaks.rows,
    "combining": combining.rows,
    "streaming": streaming.rows,
    "clipping": clipping.rows,
    "staging": staging.rows,
    "samples": samples.rows,
    "growth": growth.rows,
    "compiling": compiling.rows,
    "tracing": tracing.rows,
    "instructions": instructions.rows,
}


def measured(name: str, plan: Plan, seconds: float = 3600) -> list[Row]:
    """Return the rows of a room; if it fails, or takes longer than this, one that says why."""
    out_of_time = [Row(what=name, against="-", note=f"out of time; --only {name}")]
    if seconds <= 0:
        return out_of_time
    if plan.quick:
        return list(ROOMS[name](plan))
    here, device = "benchmarks.rooms:rows_here", str(plan.device)
    try:
        found = fresh.call(here, seconds=seconds, name=name, device=device)
    except subprocess.TimeoutExpired:
        return out_of_time
    except RuntimeError as error:
        *_, last = str(error).splitlines()
        return [Row(what=name, against="-", note=last)]
    return [Row.from_plain(values) for values in found]


def rows_here(name: str, device: str) -> list[dict[str, Any]]:
    """Return the rows of a room as plain values; what a fresh process runs."""
    torch.set_num_threads(1)  # also for what is not timed: two threads on a busy core wait and spin
    torch.manual_seed(0)
    return [asdict(row) for row in ROOMS[name](Plan(torch.device(device)))]
