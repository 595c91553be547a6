"""How many calls Python makes in a call of gradkit, and how many functions run in one.

`python -m benchmarks.counting` prints the counts beside the ceilings in `ceilings.json`;
`python -m benchmarks.counting --write` makes the counts the ceilings. Lower them when a change has
saved calls. A change that adds some raises them, and says in its commit what they buy.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import optree
import torch

import gradkit
from benchmarks import heads, models, reading, training, values
from benchmarks.harness import Side
from benchmarks.heads import Size
from benchmarks.nets import NETS

CEILINGS = Path(__file__).with_name("ceilings.json")
_CPU = torch.device("cpu")
_WARMUP = 3
_ABOUT = (
    "Calls that Python makes, of Python and of C functions, in one clean call of gradkit, and how "
    "many of gradkit's own functions and files run, as counted with the versions below. "
    "tests/benchmarks/test_counting.py fails above them. Count anew: python -m benchmarks.counting "
    "--write"
)


def _stepping() -> Side:
    """Return a step of Adam on 20 tensors; their gradients are found before."""
    net = NETS["10 linear layers 64 wide"]
    model = net.make()
    optimizer = training.OPTIMIZERS["Adam"](model.parameters())

    def build() -> Any:
        return gradkit.value_and_grads(net.loss(model, net.batch(_CPU)), model)[1]

    return Side(build, lambda grads: gradkit.step_(optimizer, model, grads))


SUBJECTS: dict[str, Callable[[], Side]] = {
    "value_and_grads, 2 tensors": lambda: values.sides(models.deep(16, 1, 4, _CPU))["gradkit"],
    "value_and_grads, 200 tensors": lambda: values.sides(models.deep(16, 100, 4, _CPU))["gradkit"],
    "step_ with Adam, 20 tensors": _stepping,
    "per_loss_grads, 8 heads": lambda: heads.sides(Size(64, 3, 4, 8).task(_CPU))["gradkit"],
}


def counts() -> dict[str, int]:
    """Return the number of calls by subject; a process that has seen hooks makes more of them."""
    return {name: calls(make()) for name, make in SUBJECTS.items()} | reading.counts()


def calls(side: Side) -> int:
    """Return how many calls Python makes in one that has been made before."""
    for _ in range(_WARMUP):  # what is cached, is
        side.run(side.build())
    inputs = side.build()
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    collected = gc.isenabled()
    gc.disable()  # a collection may call back
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = side.run(inputs)
    finally:
        sys.setprofile(before)
        if collected:
            gc.enable()
    del result
    return count - 1  # setprofile's own


def ceilings() -> dict[str, int]:
    """Return the largest numbers of calls that are allowed."""
    every: dict[str, int] = json.loads(CEILINGS.read_text())["calls"]
    return every


def counted_with() -> tuple[str, str]:
    """Return the Python and the torch that the ceilings were counted with: ("3.11", "2.13.0")."""
    about: dict[str, str] = json.loads(CEILINGS.read_text())
    return about["python"].rpartition(".")[0], about["torch"].partition("+")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts as JSON, or make them the ceilings."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counting", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the counts the ceilings")
    write = parser.parse_args(arguments).write
    counted = counts()
    if write:
        about = {
            "about": _ABOUT,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "optree": optree.__version__,
        }
        CEILINGS.write_text(json.dumps(about | {"calls": counted}, indent=2) + "\n")
    allowed = ceilings()
    for name, count in counted.items():
        print(f"{name}: {count}, at most {allowed.get(name, 'any')}")
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
