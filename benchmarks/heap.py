"""A training step by itself in a fresh process, as a user runs it: time, page faults, and peak.

The loop's process does not import gradkit, which keeps freed memory at the top of the heap.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks import fresh
from benchmarks.plan import Plan
from benchmarks.row import Row, Want

_RUNS = 2
_WIDTHS = (128, 512, 1024)
# The time is the first quartile of 40 steps; the faults are the median of them.
_SCRIPT = """
import json, resource, statistics, time
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
width, mse = {width}, torch.nn.functional.mse_loss
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers)
params = list(model.parameters())
x, y = torch.randn(64, width), torch.randn(64, width)
optimizer = torch.optim.{optimizer}(params, lr=1e-3)
{step}

def use():
    return resource.getrusage(resource.RUSAGE_SELF)

times, faults = [], []
for number in range(50):
    before, start = use().ru_minflt, time.thread_time()
    step()
    times.append(1e3 * (time.thread_time() - start))
    faults.append(use().ru_minflt - before)
low = statistics.quantiles(times[10:])[0]
peak = use().ru_maxrss / 1024
print(json.dumps({{"ms": low, "faults": statistics.median(faults[10:]), "peak_mb": peak}}))
"""
_STEPS = {
    "loop": """
def step():
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
""",
    "two calls": """
import gradkit

def step():
    _, grads = gradkit.value_and_grads(mse(model(x), y), params)
    gradkit.step_(optimizer, params, grads)
""",
    "minimize_": """
import gradkit

def step():
    gradkit.minimize_(optimizer, mse(model(x), y))
""",
}
# At most this ratio to the loop.
_WANTED = {("two calls", "SGD"): 1.05, ("two calls", "Adam"): 1.03}


def rows(plan: Plan) -> Iterator[Row]:
    """Yield the rows of both ways, for each optimizer and width."""
    for optimizer in ("SGD", "Adam"):
        for width in _WIDTHS:
            found = {} if plan.quick else _measured(optimizer, width)
            for way in ("two calls", "minimize_"):
                what = f"{way} with {optimizer}, MLP, 4 layers {width} wide, in a fresh process"
                if plan.quick:
                    yield Row(what=what, against="loop", note="needs processes of its own")
                    continue
                ours, theirs = found[way]["ms"], found["loop"]["ms"]
                limit = _WANTED.get((way, optimizer), 0.95) if width == 512 else None
                yield Row(
                    what=what,
                    against="zero_grad, backward, step",
                    ours=ours,
                    theirs=theirs,
                    ratio=ours / theirs,
                    figure=ours / theirs,
                    want=None if limit is None else Want(limit),
                    note=f"faults {found[way]['faults']:.0f} and {found['loop']['faults']:.0f}",
                    details=found,
                )


def _measured(optimizer: str, width: int) -> dict[str, dict[str, float]]:
    """Return the medians of some processes of each way, one way after the other."""
    runs: dict[str, list[Any]] = {way: [] for way in _STEPS}
    for _ in range(_RUNS):
        for way, step in _STEPS.items():
            code = _SCRIPT.format(width=width, optimizer=optimizer, step=step)
            runs[way].append(fresh.python("-c", code))
    return {
        way: {key: median(run[key] for run in found) for key in found[0]}
        for way, found in runs.items()
    }
