"""The tasks of multitask_digits, without conflict between them, on several processes.

Three losses share a trunk, and their gradients disagree: a step that helps one hurts another.
PCGrad takes from each gradient what conflicts with the others. Which conflicts there are is a
matter of the whole batch, not of the share of it that a process has. So under data parallelism the
gradient of each loss is averaged over the processes first, and combined then. To average what each
process has combined would be another method.

The result must be that of one process that is given all shares: its weights but for the rounding of
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

# Before there is a group. Its functions have the group that there is as a default argument, and if
# DDP imports it then, the group and its threads outlive destroy_process_group(). A thread that lets
# go of a tensor while the interpreter ends aborts the process. See docs/several_processes.md.
import torch.distributed.nn.functional  # noqa: F401
from _script import conclude, options_of, progress_on
from multitask_digits import (
    LEARNING_RATE,
    WEIGHTS,
    Batch,
    MultiTask,
    Sight,
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
LOOK_EVERY = 10  # steps, in the table and the picture
TOLERANCE = 1e-9  # of the weights against those of one process, relatively

PerLoss: TypeAlias = dict[str, dict[str, Tensor | None]]  # gradients by loss and parameter
Aggregator: TypeAlias = Callable[[Tensor], Tensor]  # from [losses, n] to [n]


# --- From the gradients of all losses to one gradient --------------------------------------------


def pcgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the rows, each without what conflicts with the other ones."""
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
    """Return the three losses in the units in which they are to be weighed up."""
    return {name: WEIGHTS[name] * loss for name, loss in multitask_losses(model, batch).items()}


def shared_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, aggregator: Aggregator
) -> PerLoss:
    """Take one step of a replicated model, with a process's share of the batch."""
    share = Batch(*(part[dist.get_rank() :: dist.get_world_size()] for part in batch))
    # One collective for all losses: what comes back is the same on all processes.
    per_loss: PerLoss = gradkit.distributed.per_loss_grads(weighted_losses(model, share), model)
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


def look(step: int, per_loss: PerLoss) -> Sight:
    """Measure how the losses pull at the trunk, which all of them have in common."""
    trunk = {
        loss: {name: grad for name, grad in grads.items() if "trunk" in name}
        for loss, grads in per_loss.items()
    }
    return Sight(step, gradkit.report.conflicts(trunk))


# --- Training ------------------------------------------------------------------------------------

Step: TypeAlias = Callable[[nn.Module, Optimizer, Batch, Aggregator], PerLoss]


@dataclass(frozen=True)
class Size:
    """How long to train, on how much, and what must come out."""

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
) -> list[Sight]:
    """Train a model in place, and return what was seen at every step."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    task = progress.add_task(name, total=len(batches), told="")
    sights = []
    for index, batch in enumerate(batches):
        sights.append(look(index, step(model, optimizer, batch, aggregator)))
        pairs = len(sights[-1].found.conflicting)
        progress.update(task, advance=1, told=f"{pairs} of 3 pairs in conflict")
    return sights


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        sights: How the losses pulled, by step.
        accuracy: The shares of the test set that the classifying heads get right.
        apart: The processes whose weights are others than this one's, by a bit at least.
        difference: The largest difference of a weight from that of one process alone, relatively to
            the largest weight.
    """

    sights: list[Sight]
    accuracy: dict[str, float]
    apart: list[int]
    difference: float

    @property
    def conflicts(self) -> dict[tuple[str, str], float]:
        """The share of the steps at which two losses were in conflict, by pair."""
        every = record(self.sights).cosines
        return {pair: sum(c < 0 for c in cosines) / len(cosines) for pair, cosines in every.items()}


def experiment(
    size: Size, device: torch.device, aggregator: Aggregator, console: Console
) -> Outcome:
    """Train on all processes together and, in every one, on all of their batches alone."""
    data, test = (in_double(part) for part in load(size.images, device))
    batches = shuffled(data, size.epochs, BATCH)
    model = fresh_model(device).double()
    alone = deepcopy(model)
    # It copies the weights of the first process to the others.
    replica = DistributedDataParallel(model)
    count = dist.get_world_size()
    with progress_on(console) as progress:
        sights = train(replica, batches, shared_step, aggregator, progress, f"{count} processes")
        train(alone, batches, lone_step, aggregator, progress, "one alone")
    return Outcome(sights, accuracies(model, test), apart(model), difference(model, alone))


def in_double(data: Batch) -> Batch:
    """Return the same images in double precision, in which rounding hides no mistake."""
    return Batch(data.images.double(), data.digits)


# --- What the demo promises ----------------------------------------------------------------------


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
    """Return the largest difference of two weights, relatively to the largest weight."""
    ours, theirs = (parameters_to_vector(one.parameters()) for one in (model, alone))
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def broken_promises(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each promise that this run did not keep."""
    broken = []
    if outcome.apart:
        processes = ", ".join(map(str, outcome.apart))
        broken.append(f"process {dist.get_rank()} has other weights than {processes}")
    # Not `>`, which NaN would pass.
    if not outcome.difference <= TOLERANCE:
        broken.append(f"the weights differ by {outcome.difference:.1e} from those of one process")
    accuracy = outcome.accuracy["digit"]
    if accuracy <= size.accuracy:
        broken.append(
            f"the digit head's test accuracy is {accuracy:.1%}, not above {size.accuracy:.0%}"
        )
    return broken


# --- Telling, and several processes --------------------------------------------------------------


def result_table(outcome: Outcome) -> Table:
    """Return what came out, a line each."""
    shares = (f"{a} and {b} {share:.0%}" for (a, b), share in outcome.conflicts.items())
    steps, tests = len(outcome.sights), outcome.accuracy.items()
    table = Table.grid(padding=(0, 2))
    table.add_row("conflict", f"{', '.join(shares)} of {steps} steps")
    table.add_row("one process", f"largest relative difference {outcome.difference:.1e}")
    table.add_row("test accuracy", ", ".join(f"{name} {share:.1%}" for name, share in tests))
    return table


def own_device(kind: torch.device) -> torch.device:
    """Return where this process computes: on a GPU of its own, as far as there are so many."""
    if kind.type != "cuda":
        return kind
    place = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(place)
    return torch.device(kind.type, place)


def backend_for(device: torch.device) -> str:
    """Return NCCL where every process has a GPU of its own, as it asks for; else gloo."""
    enough = device.type == "cuda" and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    return "cpu:gloo,cuda:nccl" if enough else "gloo"


def with_torchrun(argv: Sequence[str]) -> int:
    """Start this script again as two processes, and return the exit status."""
    print("not started by torchrun: it is called now, for two processes on this machine")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.call(
        [sys.executable, *torchrun, __file__, *argv], env={"OMP_NUM_THREADS": "1"} | os.environ
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if it kept every promise."""
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
            parser.error(f"{BATCH} images are not to be shared out among {dist.get_world_size()}")
        is_first = dist.get_rank() == 0
        console = Console(quiet=not is_first)
        # When it returns, no DDP module is left: none may outlive the group.
        outcome = experiment(size, device, AGGREGATORS[options.aggregator](), console)
        broken = broken_promises(outcome, size)
    finally:
        dist.destroy_process_group()
    if not is_first:
        return 1 if broken else 0
    picture = options.output / "multitask_ddp.png"
    history = record(outcome.sights[::LOOK_EVERY])
    draw(history, picture)

    console.print("How the losses pull at the trunk", history, result_table(outcome), sep="\n")
    kept = "the weights are those of one process, and the same bits in all"
    return conclude(console, picture, broken, kept)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
