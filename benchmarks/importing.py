"""What importing gradkit costs over importing torch, in fresh processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median

from benchmarks import fresh
from benchmarks.harness import quartiles
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_OURS = ("gradkit", "optree")
_SCRIPT = """
import json, sys, time
start = time.perf_counter()
import torch
between = time.perf_counter()
before = set(sys.modules)
resumed = time.perf_counter()
import gradkit
stop = time.perf_counter()
print(json.dumps({
    "torch_ms": 1e3 * (between - start),
    "gradkit_ms": 1e3 * (stop - resumed),
    "modules": sorted(set(sys.modules) - before),
}))
"""


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the row of the time, and that of the modules that nobody asked for."""
    what = "import gradkit, after torch"
    if plan.quick:
        yield Row(what=what, against="import torch", note="needs processes of its own")
        return
    fresh.python("-c", _SCRIPT)  # this one may have to compile to bytecode
    found = [fresh.python("-c", _SCRIPT) for _ in range(15)]
    ours, theirs = ([run[key] for run in found] for key in ("gradkit_ms", "torch_ms"))
    yield Row(
        what=what,
        against="import torch",
        ours=median(ours),
        theirs=median(theirs),
        ratio=median(ours) / median(theirs),
        spread=quartiles([a / b for a, b in zip(ours, theirs, strict=True)]),
        figure=median(ours),
        want=Want(60, "ms"),
        details={"gradkit_quartiles_ms": quartiles(ours), "torch_quartiles_ms": quartiles(theirs)},
    )
    yield _modules(found[-1]["modules"])


def _modules(names: list[str]) -> Row:
    foreign = [name for name in names if name.split(".")[0] not in _OURS]
    extras = [name for name in foreign if name.split(".")[0] not in sys.stdlib_module_names]
    return Row(
        what="modules that import gradkit adds, of others",
        against="import torch",
        ours=len(extras),
        theirs=0,
        unit="modules",
        figure=len(extras),
        want=Want(0, "modules"),
        note=", ".join(extras) or "a count: none but gradkit, optree, the standard library",
        details={"others": extras, "standard_library": [n for n in foreign if n not in extras]},
    )
