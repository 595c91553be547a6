"""The tasks of multitask_digits with PCGrad, on several processes.

Three losses share a trunk, and their gradients conflict: a step that helps one hurts another.
PCGrad removes from each gradient what conflicts with the others. The conflicts are those of the
whole batch, not of one process's shard. So under data parallelism the gradient of each loss is
averaged over the processes first, and then combined. Averaging what each process has combined would
be another method.

The result must be that of one process on the whole batch: the same weights up to the rounding of
double precision, and the same bits on all processes.

    torchrun --nproc-per-node 2 examples/multitask_ddp.py [--aggregator upgrad] [--smoke]
        [--device cuda] [--output folder]

Started without torchrun, it calls torchrun for two processes.

Source: PCGrad is algorithm 1 of Yu et al. 2020, "Gradient Surgery for Multi-Task Learning",
https://arxiv.org/abs/2001.06782; UPGrad of Quinton and Rey 2024, "Jacobian Descent for
Multi-Objective Optimization", https://arxiv.org/abs/2406.16232.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

# Imported before a group exists: its functions hold the current group as a default argument. If
# DDP imports it later, the group and its threads outlive destroy_process_group(), and a thread that
# frees a tensor while the interpreter exits aborts the process. See docs/several_processes.md.
import torch.distributed.nn.functional  # noqa: F401
from _script import conclude, options_of, progress_on
from multitask_digits import (
    LEARNING_RATE,
    WEIGHTS,
    Batch,
    MultiTask,
    Snapshot,
    accuracies,
    draw,
    fresh_model,
    load,
    multitask_losses,
    record,
    shuffled,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim import Adam, Optimizer

import gradkit

BATCH = 60  # images, of all processes together: a number that 2, 3, 4, 5 and 6 divide
RECORD_EVERY = 10  # steps, in the table and the picture
TOLERANCE = 1e-9  # of the weights against those of one process, relatively

PerLoss: TypeAlias = dict[str, dict[str, Tensor | None]]  # gradients by loss and parameter
Aggregator: TypeAlias = Callable[[Tensor], Tensor]  # from [losses, n] to [n]


# --- From the gradients of all losses to one gradient --------------------------------------------


def pcgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the rows, each without its conflicts with the others."""
    projected = []
    for index, row in enumerate(matrix):
        # The paper draws the order of the others at random. Then every process would have to draw
        # the same one.
        for other in [*matrix[:index], *matrix[index + 1 :]]:
            if row @ other < 0:
                row = row - (row @ other) / (other @ other) * other
        projected.append(row)
    return torch.stack(projected).sum(0)


def upgrad() -> Aggregator:
    """Return TorchJD's UPGrad, which needs no changes."""
    try:
        from torchjd.aggregation import UPGrad
    except ImportError as error:
        raise ImportError("TorchJD is not installed: pip install gradkit[torchjd]") from error
    aggregator: Aggregator = UPGrad()
    return aggregator


AGGREGATORS: dict[str, Callable[[], Aggregator]] = {"pcgrad": lambda: pcgrad, "upgrad": upgrad}


# --- The two training steps ----------------------------------------------------------------------


def weighted_losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the three losses times their weights."""
    return {name: WEIGHTS[name] * loss for name, loss in multitask_losses(model, batch).items()}


def shared_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, aggregator: Aggregator
) -> PerLoss:
    """Take one step of a replicated model, with this process's shard of the batch."""
    shard = Batch(*(part[dist.get_rank() :: dist.get_world_size()] for part in batch))
    # One collective for all losses; the result is the same on all processes.
    per_loss: PerLoss = gradkit.distributed.per_loss_grads(weighted_losses(model, shard), model)
    optimizer.zero_grad()
    gradkit.add_grads_(model, gradkit.combine(per_loss, aggregator), hooks=True)
    optimizer.step()
    return per_loss


def lone_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, aggregator: Aggregator
) -> PerLoss:
    """Take one step of one process, with the whole batch."""
    per_loss: PerLoss = gradkit.per_loss_grads(weighted_losses(model, batch), model)
    gradkit.step_(optimizer, model, gradkit.combine(per_loss, aggregator))
    return per_loss


def measure(step: int, per_loss: PerLoss) -> Snapshot:
    """Measure the conflicts in the trunk, which all losses share."""
    trunk = {
        loss: {name: grad for name, grad in grads.items() if "trunk" in name}
        for loss, grads in per_loss.items()
    }
    return Snapshot(step, gradkit.report.conflicts(trunk))


# --- Training ------------------------------------------------------------------------------------

Step: TypeAlias = Callable[[nn.Module, Optimizer, Batch, Aggregator], PerLoss]


@dataclass(frozen=True)
class Size:
    """How long to train, on how much, and the thresholds of the checks."""

    epochs: int
    images: int
    accuracy: float  # what the digit head must exceed on the test set


FULL = Size(epochs=20, images=1320, accuracy=0.95)
SMOKE = Size(epochs=2, images=240, accuracy=-1.0)


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    step: Step,
    aggregator: Aggregator,
    progress: Progress,
    name: str,
) -> list[Snapshot]:
    """Train a model in place, and return the conflicts at every step."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    task = progress.add_task(name, total=len(batches), status="")
    snapshots = []
    for index, batch in enumerate(batches):
        snapshots.append(measure(index, step(model, optimizer, batch, aggregator)))
        pairs = len(snapshots[-1].conflicts.conflicting)
        progress.update(task, advance=1, status=f"{pairs} of 3 pairs in conflict")
    return snapshots


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        snapshots: The conflicts, by step.
        accuracy: The test accuracies of the classifying heads.
        apart: The processes whose weights differ from this one's in at least one bit.
        difference: The largest difference from the weights of a single process, relative to the
            largest weight.
    """

    snapshots: list[Snapshot]
    accuracy: dict[str, float]
    apart: list[int]
    difference: float

    @property
    def conflicts(self) -> dict[tuple[str, str], float]:
        """The share of the steps at which two losses were in conflict, by pair."""
        every = record(self.snapshots).cosines
        return {pair: sum(c < 0 for c in cosines) / len(cosines) for pair, cosines in every.items()}


def experiment(
    size: Size, device: torch.device, aggregator: Aggregator, console: Console
) -> Outcome:
    """Train on all processes together and, for comparison, in each process on the whole batch."""
    data, test = (in_double(part) for part in load(size.images, device))
    batches = shuffled(data, size.epochs, BATCH)
    model = fresh_model(device).double()
    alone = deepcopy(model)
    # It copies the weights of the first process to the others.
    replica = DistributedDataParallel(model)
    count = dist.get_world_size()
    with progress_on(console) as progress:
        snapshots = train(replica, batches, shared_step, aggregator, progress, f"{count} processes")
        train(alone, batches, lone_step, aggregator, progress, "one alone")
    return Outcome(snapshots, accuracies(model, test), apart(model), difference(model, alone))


def in_double(data: Batch) -> Batch:
    """Return the same images in double precision, where rounding cannot hide a mistake."""
    return Batch(data.images.double(), data.digits)


# --- The checks ----------------------------------------------------------------------------------


@torch.no_grad()
def apart(model: MultiTask) -> list[int]:
    """Return the processes whose weights differ from this one's in at least one bit."""
    # As integers, because as floats 0.0 equals -0.0, and NaN does not equal itself.
    mine = parameters_to_vector(model.parameters()).view(torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, mine)]


@torch.no_grad()
def difference(model: MultiTask, alone: MultiTask) -> float:
    """Return the largest difference of two weights, relative to the largest weight."""
    ours, theirs = (parameters_to_vector(one.parameters()) for one in (model, alone))
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def failed_checks(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    if outcome.apart:
        processes = ", ".join(map(str, outcome.apart))
        failed.append(f"process {dist.get_rank()} has other weights than {processes}")
    # Not `>`, which NaN would pass.
    if not outcome.difference <= TOLERANCE:
        failed.append(f"the weights differ by {outcome.difference:.1e} from those of one process")
    accuracy = outcome.accuracy["digit"]
    if accuracy <= size.accuracy:
        failed.append(
            f"the digit head's test accuracy is {accuracy:.1%}, not above {size.accuracy:.0%}"
        )
    return failed


# --- Tables, and several processes ---------------------------------------------------------------


def result_table(outcome: Outcome) -> Table:
    """Return the results, one line each."""
    shares = (f"{a} and {b} {share:.0%}" for (a, b), share in outcome.conflicts.items())
    steps, tests = len(outcome.snapshots), outcome.accuracy.items()
    table = Table.grid(padding=(0, 2))
    table.add_row("conflict", f"{', '.join(shares)} of {steps} steps")
    table.add_row("one process", f"largest relative difference {outcome.difference:.1e}")
    table.add_row("test accuracy", ", ".join(f"{name} {share:.1%}" for name, share in tests))
    return table


def own_device(kind: torch.device) -> torch.device:
    """Return where this process computes: a separate GPU, if there are enough."""
    if kind.type != "cuda":
        return kind
    index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device(kind.type, index)


def backend_for(device: torch.device) -> str:
    """Return NCCL if every process has a separate GPU, which it needs; else gloo."""
    enough = device.type == "cuda" and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def with_torchrun(argv: Sequence[str], script: str = __file__) -> int:
    """Start a script again as two processes, and return the exit status."""
    print("not started by torchrun: starting it now, with two processes on this machine")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.call(
        [sys.executable, *torchrun, script, *argv], env={"OMP_NUM_THREADS": "1"} | os.environ
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    parser = options_of(__doc__)
    parser.add_argument("--aggregator", choices=AGGREGATORS, default="pcgrad")
    options = parser.parse_args(argv)
    if not dist.is_torchelastic_launched():
        return with_torchrun(sys.argv[1:] if argv is None else argv)
    size = SMOKE if options.smoke else FULL
    device = own_device(options.device)
    dist.init_process_group(backend_for(device))
    try:
        if BATCH % dist.get_world_size():
            parser.error(f"{BATCH} images cannot be divided among {dist.get_world_size()}")
        is_first = dist.get_rank() == 0
        console = Console(quiet=not is_first)
        # No DDP module may outlive the group: when this returns, none is left.
        outcome = experiment(size, device, AGGREGATORS[options.aggregator](), console)
        failed = failed_checks(outcome, size)
    finally:
        dist.destroy_process_group()
    if not is_first:
        return 1 if failed else 0
    picture = options.output / "multitask_ddp.png"
    history = record(outcome.snapshots[:: 1 if options.smoke else RECORD_EVERY])
    draw(history, picture)

    console.print("Gradients of the losses at the trunk", history, result_table(outcome), sep="\n")
    summary = "the weights are those of one process, and the same bits in all processes"
    return conclude(console, picture, failed, summary)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
