"""First and second gradients over shards: against fully_shard, and whole parameters."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import fresh, memory, replicas, shards
from benchmarks.harness import Effort, Timing, measure
from benchmarks.memory import Peak
from benchmarks.plan import Plan
from benchmarks.row import Row, Want, timed
from benchmarks.shards import Net

_NET, _QUICK = Net(512, 8, 16), Net(8, 2, 3)
_RANKS = (2, 4)
_ROUNDS = 3
_TRIES = 3  # of a peak


def rows(plan: Plan) -> Iterator[Row]:
    """Yield for each call and number of ranks the rows for time and memory."""
    if plan.device.type != "cpu":
        note = "it is measured over gloo, on the CPU: --device cpu"
        yield Row(what="distributed.make_functional", against=shards.FSDP, note=note)
        return
    net = _QUICK if plan.quick else _NET
    # Of parameter memory, by call: more ranks should do better than fewer.
    ratios: dict[str, float] = {}
    for ranks in (1,) if plan.quick else _RANKS:
        found = _on_ranks(plan, ranks, net)
        for call, of_call in found.items():
            what = f"distributed.make_functional, {call}, {_processes(ranks)}, {net}"
            yield from _of_call(what, call, of_call, ratios)


def _processes(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} processes"


def _of_call(
    what: str, call: str, found: Mapping[str, Any], ratios: dict[str, float]
) -> Iterator[Row]:
    _, against = shards.CALLS[call]
    if not found["agree"]:
        yield Row(what=what, against=against, note="it gives other gradients")
        return
    timings = {name: Timing(tuple(taken)) for name, taken in found["samples"].items()}
    yield timed(what, against, timings, theirs=against, limit=None)
    ours, theirs = (Peak(**found["peaks"][name]) for name in ("gradkit", against))
    yield memory.row(what, against, ours, theirs, 1.3 if call == shards.STEP else None)
    if call != shards.STEP:
        row = _parameter_memory(what, against, found["parameters"], ratios.get(call, 0.6))
        ratios[call] = row.ratio or 0.0
        yield row


def _parameter_memory(what: str, against: str, found: Mapping[str, float], limit: float) -> Row:
    ratio = found["gradkit"] / found[against]
    return Row(
        what=f"{what}, parameter memory",
        against=against,
        ours=found["gradkit"] / 1e6,
        theirs=found[against] / 1e6,
        unit="MB",
        ratio=ratio,
        figure=ratio,
        want=Want(limit),
        details=dict(found),
    )


def _on_ranks(plan: Plan, ranks: int, net: Net) -> dict[str, Any]:
    """Return the figures of the first of several ranks, by call."""
    arguments: dict[str, Any] = {"net": asdict(net), "rounds": 2 if plan.quick else _ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        arguments["rendezvous"] = str(Path(folder) / "rendezvous")
        if plan.quick:
            return compare(rank=0, ranks=ranks, **arguments)
        found: dict[str, Any] = fresh.ranks("benchmarks.sharding:compare", ranks, **arguments)
        return found


def compare(net: dict[str, int], rounds: int, **group: Any) -> dict[str, Any]:
    """Return the figures of all calls as plain values; what a rank runs."""
    if group["ranks"] > 1:
        torch.set_num_threads(1)
    with replicas.group(**group), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch renames its collectives
        return {call: _compare(call, Net(**net), rounds) for call in shards.calls()}


def _compare(call: str, net: Net, rounds: int) -> dict[str, Any]:
    if not shards.agree(call, net):
        return {"agree": False}
    # The same number of rounds on all ranks, whatever the time: otherwise a rank would hang.
    effort = Effort(least=rounds, most=rounds, seconds=0, warmup=1)
    # gloo works in threads of its own.
    timings = measure(shards.sides(call, net), torch.device("cpu"), effort, time.process_time_ns)
    tries = 1 if dist.get_world_size() == 1 else _TRIES
    return {
        "agree": True,
        "samples": {name: list(timing.samples) for name, timing in timings.items()},
        "peaks": shards.peaks(call, net, tries),
        "parameters": {} if call == shards.STEP else shards.parameter_memory(call, net, tries),
    }
