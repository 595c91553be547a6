"""Eight losses on one transformer, without eight sets of gradients.

A transformer reads a handwritten digit row by row, and eight heads say what it shows. TorchJD's
UPGrad weighs the eight losses so that no step is against any of them. For that it needs the inner
products of their gradients: `gradkit.value_and_grads(losses, model, weights=UPGradWeighting())`
takes them while the gradients pass by, within a budget of memory that eight sets of gradients
exceed by far.

    python examples/eight_losses.py [--smoke] [--device cuda] [--output folder]

Needs TorchJD: pip install "gradkit[torchjd]"

Source: Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
https://arxiv.org/abs/2406.16232
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

import gradkit

try:
    from torchjd.aggregation import UPGrad, UPGradWeighting
except ImportError as error:
    raise ImportError("this example needs TorchJD: pip install 'gradkit[torchjd]'") from error

SEED = 0
LEARNING_RATE = 1e-4
BATCH = 16
BUDGET = 128  # MB that a step may take beside the model and its optimizer
TOLERANCE = 1e-6  # of the gradient against that of `combine`, relatively, in float64


class Batch(NamedTuple):
    """Images of shape `[B, 8, 8]` with values from 0 to 1, and their digits of shape `[B]`."""

    images: Tensor
    digits: Tensor


class Reader(nn.Module):
    """A transformer over the eight rows of an image, with a head for each loss."""

    def __init__(self, width: int = 384, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        sizes = {"digit": 10, "odd": 1, "large": 1, "round": 1, "ink": 1, "columns": 8, "rows": 8}
        self.heads = nn.ModuleDict({name: nn.Linear(width, n) for name, n in sizes.items()})
        self.hidden = nn.Linear(width, 8)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the output of each head; of `hidden`, a row for each place."""
        states = self.layers(self.embed(rows) + self.position)
        mean = states.mean(1)
        outputs = {name: head(mean).squeeze(-1) for name, head in self.heads.items()}
        return outputs | {"hidden": self.hidden(states)}


def losses_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the eight losses; the fourth row is hidden from the model."""
    images, digits = batch
    seen = images.clone()
    seen[:, 3] = 0
    out = model(seen)
    ring = (digits == 0) | (digits == 6) | (digits == 8) | (digits == 9)

    def yes_or_no(name: str, answer: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(out[name], answer.to(images))

    return {
        "digit": functional.cross_entropy(out["digit"], digits),
        "odd": yes_or_no("odd", digits % 2 == 1),
        "large": yes_or_no("large", digits >= 5),
        "round": yes_or_no("round", ring),
        "ink": functional.mse_loss(out["ink"], images.mean((1, 2))),
        "columns": functional.mse_loss(out["columns"], images.mean(1)),
        "rows": functional.mse_loss(out["rows"], images.mean(2)),
        "hidden": functional.mse_loss(out["hidden"][:, 3], images[:, 3]),
    }


def load(device: torch.device) -> Batch:
    """Return the 1,797 images, in an order of their own."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SEED))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 8, 8) / 16
    return Batch(images[order].to(device), torch.tensor(digits)[order].to(device))


def fresh_model(device: torch.device) -> nn.Module:
    """Return the transformer at its start, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Reader().to(device)


# --- The two ways to the gradient, and the memory that each takes --------------------------------


def streamed(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Any]:
    """Return the losses and UPGrad's gradient, with one set of gradients in memory."""
    values, grads = gradkit.value_and_grads(
        losses_of(model, batch), model, weights=UPGradWeighting()
    )
    return values, grads


def from_sets(model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], Any]:
    """Return the same from a set of gradients for each loss."""
    losses = losses_of(model, batch)
    per_loss = gradkit.per_loss_grads(losses, model)
    return losses, gradkit.combine(per_loss, UPGrad())


WAYS: dict[str, Callable[[nn.Module, Batch], tuple[dict[str, Tensor], Any]]] = {
    "streamed": streamed,
    "sets": from_sets,
}


def peak_of(way: str, device: torch.device) -> float:
    """Return the MB that a step takes at its peak, measured in a process of its own."""
    # Freed tensors go back to the system at once, so that the process's size is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--device", str(device), "--peak", way]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1]))


def peak_here(way: str, device: torch.device) -> float:
    """Return the MB that this process grows by in a step."""
    model = fresh_model(device)
    data = load(device)
    batch = Batch(data.images[:BATCH], data.digits[:BATCH])
    for _ in range(2):  # libraries set up memory of their own in the first
        losses = losses_of(model, batch)
        torch.autograd.grad(losses["ink"], list(model.parameters()), allow_unused=True)
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        WAYS[way](model, batch)
        return (torch.cuda.max_memory_allocated(device) - held) / 1e6
    del losses
    before = resident()
    WAYS[way](model, batch)
    return most_resident() - before


def resident() -> float:
    """Return the MB that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def most_resident() -> float:
    """Return the MB that this process has had in memory at most."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def can_measure(device: torch.device) -> bool:
    """Return whether this system tells how much memory a process has."""
    return device.type == "cuda" or Path("/proc/self/statm").exists()


def difference_from_sets(model: nn.Module, batch: Batch) -> float:
    """Return the distance of the two ways' gradients, relative to their norm."""
    # In double precision, where rounding cannot hide a mistake.
    exact = deepcopy(model).double()
    doubles = Batch(batch.images.double(), batch.digits)
    (_, ours), (_, theirs) = streamed(exact, doubles), from_sets(exact, doubles)
    distance = gradkit.tree.global_norm(gradkit.tree.sub(ours, theirs))
    return float(distance / gradkit.tree.global_norm(theirs))


# --- Training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, and over how many steps losses are averaged to see whether they fall."""

    steps: int
    averaged: int


FULL = Size(steps=80, averaged=10)
SMOKE = Size(steps=3, averaged=3)  # too short for all to fall


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        losses: By name, at every step.
        peaks: MB that a step takes, by way; empty where they cannot be measured.
        difference: The relative distance of the gradient from that of `combine`.
    """

    losses: dict[str, list[float]]
    peaks: dict[str, float]
    difference: float


def train(model: nn.Module, data: Batch, size: Size, console: Console) -> dict[str, list[float]]:
    """Train the model in place, and return every loss at every step."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    history: dict[str, list[float]] = {}
    with progress_on(console) as progress:
        task = progress.add_task("step", total=size.steps, status="")
        for step in range(size.steps):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            values, grads = streamed(model, Batch(data.images[rows], data.digits[rows]))
            gradkit.step_(optimizer, model, grads)
            for name, value in values.items():
                history.setdefault(name, []).append(value.item())
            progress.update(task, advance=1, status=f"digit {history['digit'][-1]:.2f}")
    return history


def experiment(size: Size, device: torch.device, console: Console) -> Outcome:
    """Measure the memory of both ways, compare their gradients, and train with one."""
    model, data = fresh_model(device), load(device)
    peaks = {way: peak_of(way, device) for way in WAYS} if can_measure(device) else {}
    difference = difference_from_sets(model, Batch(data.images[:BATCH], data.digits[:BATCH]))
    return Outcome(train(model, data, size, console), peaks, difference)


# --- The checks, the table and the picture -------------------------------------------------------


def ends(losses: list[float], size: Size) -> tuple[float, float]:
    """Return the means over the first steps and over the last."""
    first, last = losses[: size.averaged], losses[-size.averaged :]
    return sum(first) / len(first), sum(last) / len(last)


def failed_checks(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    # Not `>`, which NaN would pass.
    if not outcome.difference <= TOLERANCE:
        failed.append(f"the gradient differs from combine's by {outcome.difference:.1e}")
    if outcome.peaks and not outcome.peaks["streamed"] <= BUDGET:
        failed.append(f"a step took {outcome.peaks['streamed']:.0f} MB, more than {BUDGET}")
    if outcome.peaks and not outcome.peaks["sets"] > BUDGET:
        failed.append(f"eight sets of gradients fit: {outcome.peaks['sets']:.0f} MB")
    if size.steps >= 2 * size.averaged:
        for name, losses in outcome.losses.items():
            first, last = ends(losses, size)
            if not last < first:
                failed.append(f"the loss {name!r} has not fallen: {first:.3f} to {last:.3f}")
    return failed


def result_table(outcome: Outcome, size: Size) -> Table:
    """Return the losses before and after, and the memory of a step."""
    table = Table(title=f"Eight losses, {size.steps} steps with UPGrad's weights")
    for heading in ("", "first", "last"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, losses in outcome.losses.items():
        table.add_row(name, *(f"{value:.3f}" for value in ends(losses, size)))
    table.add_section()
    for way, peak in outcome.peaks.items():
        table.add_row(f"peak memory, {way}", "", f"{peak:.0f} MB")
    table.add_row("budget", "", f"{BUDGET} MB")
    table.add_row("from combine's gradient", "", f"{outcome.difference:.0e}")
    return table


def draw(outcome: Outcome, path: Path) -> None:
    """Save a picture of the losses over the steps, and of the memory of a step."""
    figure = blank_figure(10, 4)
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, losses in outcome.losses.items():
        curves.plot([value / losses[0] for value in losses], label=name)
    curves.set(xlabel="step", ylabel="loss, over that of the first step", yscale="log")
    tidy(curves, "Eight losses, weighed by UPGrad", ncols=4, loc="lower left")
    labels = {"streamed": "gradients that\npass by", "sets": "eight sets\nof gradients"}
    bars.bar([labels[way] for way in outcome.peaks], list(outcome.peaks.values()), width=0.5)
    bars.axhline(BUDGET, color="#d62728", linestyle="--", label=f"budget, {BUDGET} MB")
    bars.set(ylabel="peak memory of a step, MB")
    tidy(bars, "What a step takes")
    save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    parser = options_of(__doc__)
    parser.add_argument("--peak", choices=list(WAYS), help="print the MB that a step takes")
    options = parser.parse_args(argv)
    if options.peak:
        print(json.dumps(peak_here(options.peak, options.device)))
        return 0
    size = SMOKE if options.smoke else FULL
    console = Console()
    outcome = experiment(size, options.device, console)
    picture = options.output / "eight_losses.png"
    draw(outcome, picture)

    console.print(result_table(outcome, size))
    summary = "UPGrad's step fits the budget that eight sets of gradients exceed"
    return conclude(console, picture, failed_checks(outcome, size), summary)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
