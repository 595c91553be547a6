"""Heads on one trunk: the ways to get a gradient for each head's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import gradkit
from benchmarks import models
from benchmarks.harness import Effort, Side, measure
from benchmarks.models import Task

LOOP = "autograd.grad in a loop"
TORCHJD = "TorchJD jac"


@dataclass(frozen=True, slots=True)
class Size:
    """How large trunk and heads are, and whether to differentiate by the trunk alone."""

    width: int
    depth: int
    batch: int
    count: int
    shared: bool = False

    def task(self, device: torch.device) -> Task:
        """Return a task of this size."""
        return models.heads(
            self.width, self.depth, self.batch, self.count, device, shared=self.shared
        )

    def __str__(self) -> str:
        by = ", trunk only" if self.shared else ""
        return f"W{self.width} D{self.depth} B{self.batch} K{self.count}{by}"


def sides(task: Task) -> dict[str, Side]:
    """Return gradkit's way and the hand-written one, for a task with a list of losses."""
    params = list(task.params.values())

    def ours(losses: list[Tensor]) -> object:
        return gradkit.per_loss_grads(losses, task.params)

    def raw(losses: list[Tensor]) -> object:
        last = len(losses) - 1
        return [
            torch.autograd.grad(loss, params, retain_graph=index < last, allow_unused=True)
            for index, loss in enumerate(losses)
        ]

    return {"gradkit": Side(task.build, ours), "raw": Side(task.build, raw)}


@dataclass(frozen=True, slots=True)
class Peer:
    """TorchJD at its fastest chunk size.

    Attributes:
        sides: The one side, by its name; none if it does not run.
        problem: Why it does not.
        tried: Milliseconds by chunk size.
    """

    sides: dict[str, Side]
    problem: str
    tried: dict[str, float]

    @property
    def name(self) -> str:
        """What it is called in the table."""
        chunk = f", chunk {min(self.tried, key=self.tried.__getitem__)}" if self.tried else ""
        return TORCHJD + chunk


def torchjd(task: Task, count: int, device: torch.device) -> Peer:
    """Return TorchJD for a task, at the fastest of three chunk sizes in the best of five rounds."""
    chunks = {str(size): size for size in sorted({1, max(1, count // 2)})}
    try:
        ways = {
            name: Side(task.build, _jac(task, chunk))
            for name, chunk in {"all": None, **chunks}.items()
        }
        timings = measure(ways, device, Effort(least=5, most=5, seconds=0, warmup=1))
    except ImportError:
        return Peer({}, "torchjd is not installed (pip install gradkit[bench])", {})
    except Exception as error:  # whatever a peer fails with is what its row says
        return Peer({}, f"{type(error).__name__}: {error}", {})
    taken = {name: min(timing.samples) / 1e6 for name, timing in timings.items()}
    return Peer({"torchjd": ways[min(taken, key=taken.__getitem__)]}, "", taken)


def _jac(task: Task, chunk: int | None) -> Callable[[Any], object]:
    jac = import_module("torchjd.autojac").jac
    params = list(task.params.values())
    return lambda losses: jac(losses, params, parallel_chunk_size=chunk)
