"""What importing gradkit costs over importing torch, in fresh processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial

from benchmarks import fresh
from benchmarks.harness import quartiles
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_OURS = ("gradkit", "optree")
_RUNS = 7
_SCRIPT = """
import json, sys, time
start = time.thread_time()
import torch
between = time.thread_time()
before = set(sys.modules)
resumed = time.thread_time()
import gradkit
stop = time.thread_time()
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
    with tempfile.TemporaryDirectory() as bytecode:  # as in an installed package
        environment = {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        run = partial(fresh.python, "-c", _SCRIPT, environment=environment)
        run()  # compiles
        found = [run() for _ in range(_RUNS)]
    every = {key: [run[key] for run in found] for key in ("gradkit_ms", "torch_ms")}
    ours, theirs = (quartiles(taken)[0] for taken in every.values())
    yield Row(
        what=what,
        against="import torch",
        ours=ours,
        theirs=theirs,
        ratio=ours / theirs,
        figure=ours,
        want=Want(35, "ms"),
        details={f"{key}_quartiles": quartiles(taken) for key, taken in every.items()},
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
