"""How many instructions a call takes under callgrind: no neighbour on the machine disturbs that."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import heads, models, training, values
from benchmarks.harness import Side
from benchmarks.heads import Size
from benchmarks.nets import NETS
from benchmarks.plan import Plan
from benchmarks.row import Row

_ROOT = Path(__file__).parents[1]
_NEEDED = ("valgrind", "callgrind_control")
_CPU = torch.device("cpu")
# Python rewrites the code of a function to what it meets in its first calls.
_WARMUP, _CALLS = 10, 3
_STEP, _HEADS = "1 linear layer, 2 tensors", Size(64, 3, 32, 8)
SUBJECTS: dict[str, tuple[str, Callable[[], dict[str, Side]]]] = {
    f"training step with SGD, {_STEP}": (
        training.LOOP,
        lambda: training.sides(NETS[_STEP], "SGD", _CPU),
    ),
    "value_and_grads, 2 params": (values.RAW, lambda: values.sides(models.deep(16, 1, 16, _CPU))),
    "value_and_grads, 200 params": (
        values.RAW,
        lambda: values.sides(models.deep(16, 100, 16, _CPU)),
    ),
    f"per_loss_grads, {_HEADS}": (heads.LOOP, lambda: heads.sides(_HEADS.task(_CPU))),
}


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each call, or one that says why there are none."""
    problem = _problem(plan)
    if problem:
        yield Row(what="instructions of a call", against="valgrind", note=problem)
        return
    counts = iter(_counted())
    for what, (against, _) in SUBJECTS.items():
        ours, theirs = next(counts), next(counts)
        yield Row(
            what=f"{what}, instructions",
            against=against,
            ours=ours / 1e6,
            theirs=theirs / 1e6,
            unit="million",
            ratio=ours / theirs,
        )


def _problem(plan: Plan) -> str:
    if plan.quick or plan.device.type != "cpu":
        return "it is counted on the CPU, in a process of its own"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    supported = torch._C._valgrind_supported_platform()
    return "" if supported else "this build of torch has no bindings for valgrind"


def _counted() -> list[float]:
    """Return the instructions of a call of each side of each subject, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        # Instrumented code is twenty times slower: not while torch is imported.
        command += ["--dump-line=no", "--instr-atstart=no", "--collect-atstart=no"]
        command += [sys.executable, "-m", "benchmarks.instructions"]
        # Sets of strings are in another order in every process otherwise.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=_ROOT, env=environment
        )
        if done.returncode != 0:
            raise RuntimeError(f"valgrind failed:\n{done.stderr}")
        dumps = [Path(f"{out}.{number}") for number in range(1, 2 * len(SUBJECTS) + 1)]
        return [_total(dump.read_text()) / _CALLS for dump in dumps]


def _total(dump: str) -> int:
    found = re.search(r"(?m)^(?:summary|totals): (\d+)", dump)
    if found is None:
        raise RuntimeError("callgrind wrote no total")
    return int(found[1])


def main() -> None:
    """Make the calls, and have callgrind write a file for each side; this runs under valgrind."""
    torch.set_num_threads(1)
    every = [side for _, make in SUBJECTS.values() for side in make().values()]
    for side in every:
        for _ in range(_WARMUP):
            side.run(side.build())
    gc.collect()
    gc.freeze()  # a full collection in between would be counted as a call's own
    subprocess.run(["callgrind_control", "--instr=on", str(os.getpid())], check=True)
    for side in every:
        for call in range(_CALLS):
            inputs = side.build()
            torch._C._valgrind_toggle()
            result = side.run(inputs)
            if call + 1 < _CALLS:
                torch._C._valgrind_toggle()
            else:
                torch._C._valgrind_toggle_and_dump_stats()
            del result, inputs


if __name__ == "__main__":
    main()
