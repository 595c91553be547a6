"""Derives the bound of `strategy="auto"`: `python -m benchmarks.choosing`, some minutes.

It times `per_loss_grads` by each strategy over kinds of nets, sizes and numbers of elements, prints
what the automatic choice took over the better of the two, and the rule that would lose least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradkit
from benchmarks import rules, vectors
from benchmarks.harness import Effort, Side, measure
from benchmarks.models import Task
from benchmarks.rules import Case
from gradkit._core.call import Strategy

_EFFORT = Effort(least=9, most=60, seconds=0.7, warmup=2)
_QUICK = Effort(least=2, most=2, seconds=0, warmup=1)
_STRATEGIES: tuple[Strategy, ...] = ("sequential", "batched", "auto")


def sweep(device: torch.device, *, quick: bool = False) -> Iterator[Case]:
    """Yield the cases as they are measured."""
    for kind, size, count in vectors.cases(quick=quick):
        task = vectors.KINDS[kind].make(size, count, device)
        # Each against the better of the two others, of which it should be one.
        timings = measure(
            {strategy: _side(task, strategy) for strategy in _STRATEGIES},
            device,
            _QUICK if quick else _EFFORT,
        )
        sequential, batched, auto = (timings[name].typical / 1e6 for name in _STRATEGIES)
        graph = _of_graph(task.build())
        yield Case(kind, size, count, **graph, sequential=sequential, batched=batched, auto=auto)


def _side(task: Task, strategy: Strategy) -> Side:
    def run(losses: Tensor) -> object:
        return gradkit.per_loss_grads(losses, task.params, strategy=strategy)

    return Side(task.build, run)


def _of_graph(loss: Tensor) -> dict[str, int]:
    """Return how many nodes a graph has, and how large the gradients are that pass through them."""
    stack: list[Any] = [loss.grad_fn]
    nodes = {*stack}
    while stack:
        above = {node for node, _ in stack.pop().next_functions if node is not None} - nodes
        nodes |= above
        stack += above
    sizes = [torch.Size(one.shape).numel() for node in nodes for one in node._input_metadata]
    return {"nodes": len(nodes), "largest": max(sizes), "total": sum(sizes)}


def line(case: Case) -> str:
    """Return a case as the table shows it."""
    return (
        f"{case.kind:20}{case.size:7}{case.count:5}{case.nodes:6}{case.largest:9}{case.total:9}"
        f"{case.sequential:10.3f}{case.batched:10.3f}{case.batched / case.sequential:8.2f}"
        f"{case.auto / case.better:8.2f}"
    )


_HEAD = (
    f"{'net':20}{'size':>7}{'n':>5}{'nodes':>6}{'largest':>9}{'total':>9}{'loop ms':>10}"
    f"{'batch ms':>10}{'b/loop':>8}{'auto':>8}"
)


def conclusions(cases: Sequence[Case]) -> Iterator[str]:
    """Yield what was found, a line each."""
    yield f"auto: {rules.said([case.auto / case.better for case in cases])}"
    for rule in rules.best(cases):
        regrets = rule.regrets(cases)
        yield f"{rule}: {rules.said(regrets)}"
    yield "what the last one loses:"
    for case, regret in zip(cases, regrets, strict=True):
        if regret > 1.03:
            strategy = "batched" if rule.batches(case) else "sequential"
            yield f"  {regret:.2f} {case.kind} {case.size}, {case.count} elements, {strategy}"


def main(arguments: Sequence[str] | None = None) -> list[Case]:
    """Measure, or read what was measured, and print the table and what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--quick", action="store_true", help="a case of each kind")
    parser.add_argument("--output", type=Path, help="write the cases to a JSON file")
    parser.add_argument("--input", type=Path, help="read them from one, and measure nothing")
    options = parser.parse_args(arguments)
    print(_HEAD)
    cases: list[Case] = []
    for case in _cases(options):
        print(line(case), flush=True)
        cases.append(case)
    print("", *conclusions(cases), sep="\n")
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    return cases


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.input is not None:
        yield from (Case(**values) for values in json.loads(options.input.read_text()))
        return
    torch.manual_seed(0)
    yield from sweep(torch.device(options.device), quick=options.quick)


if __name__ == "__main__":
    sys.exit(not main())
