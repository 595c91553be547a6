"""One trunk, three heads, two training loops, one result.

A network learns three tasks on scikit-learn's handwritten digits: which digit it is, whether it is
odd, and the image itself. It is trained twice from the same start on the same batches, by the usual
`zero_grad`, `backward`, `step` and with `gradkit.value_and_grads`. The final weights must be equal
bit for bit, although the second loop also measures the gradients of each loss.

    python examples/multitask_digits.py [--smoke] [--device cuda] [--output folder]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from _script import blank_figure, conclude, options_of, progress_on, save
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

import gradkit

SEED = 0
LEARNING_RATE = 2e-3
WEIGHTS = {"digit": 1.0, "parity": 1.0, "image": 10.0}


class Batch(NamedTuple):
    """Images of shape `[B, 64]` with values from 0 to 1, and their digits of shape `[B]`."""

    images: Tensor
    digits: Tensor


class MultiTask(nn.Module):
    """A trunk that three heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())
        self.heads = nn.ModuleDict({
            "digit": nn.Linear(64, 10),
            "parity": nn.Linear(64, 1),
            "image": nn.Linear(64, 64),
        })

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the output of each head."""
        features = self.trunk(images)
        return {name: head(features) for name, head in self.heads.items()}


def multitask_losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the three losses of a batch, each a mean over it."""
    outputs = model(batch.images)
    odd = (batch.digits % 2).to(batch.images)
    return {
        "digit": functional.cross_entropy(outputs["digit"], batch.digits),
        "parity": functional.binary_cross_entropy_with_logits(outputs["parity"].squeeze(1), odd),
        "image": functional.mse_loss(outputs["image"], batch.images),
    }


# --- The two training steps, and the measurement of conflicts ------------------------------------


def usual_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> dict[str, Tensor]:
    """Take one step through `.grad`: clear it, add to it, use it."""
    optimizer.zero_grad()
    losses = multitask_losses(model, batch)
    total = (
        WEIGHTS["digit"] * losses["digit"]
        + WEIGHTS["parity"] * losses["parity"]
        + WEIGHTS["image"] * losses["image"]
    )
    total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return {name: loss.detach() for name, loss in losses.items()}


def gradkit_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> dict[str, Tensor]:
    """Take one step with gradients that are returned."""
    losses = multitask_losses(model, batch)
    values, grads = gradkit.value_and_grads(losses, model, weights=WEIGHTS)
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]  # no copy needed: it shares memory with nothing
    optimizer.step()
    return values


@dataclass(frozen=True)
class Snapshot:
    """The unweighted gradients of the three losses at one step of the training."""

    step: int
    conflicts: gradkit.report.Conflicts  # on the trunk's parameters
    at_output: dict[str, float] = field(default_factory=dict)  # norms at the trunk's output


def measure(step: int, model: MultiTask, data: Batch) -> Snapshot:
    """Measure the conflicts in the trunk. It changes no weight."""
    with gradkit.safe_retain(model, "trunk") as kept:
        losses = multitask_losses(model, data)
        grads = gradkit.per_loss_grads(losses, model.trunk)
    at_output = zip(losses, kept.passes["trunk"], strict=True)
    return Snapshot(
        step,
        conflicts=gradkit.report.conflicts(grads),
        at_output={name: gradkit.tree.global_norm(grad).item() for name, grad in at_output},
    )


# --- Training ------------------------------------------------------------------------------------

Step: TypeAlias = Callable[[nn.Module, Optimizer, Batch], dict[str, Tensor]]
Callback: TypeAlias = Callable[[int, MultiTask], None]


@dataclass(frozen=True)
class Size:
    """How long to train, on how much, how often to measure, and the thresholds of the checks."""

    epochs: int
    images: int
    measure_every: int
    accuracy: float  # what the digit head must exceed on the test set


FULL = Size(epochs=40, images=1347, measure_every=10, accuracy=0.95)
SMOKE = Size(epochs=2, images=256, measure_every=2, accuracy=-1.0)


def load(images: int, device: torch.device) -> tuple[Batch, Batch]:
    """Return the training set, of so many images, and the test set."""
    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(
        torch.tensor(pixels, dtype=torch.float32) / 16,
        torch.tensor(digits),
        train_size=images,
        test_size=450,
        stratify=digits,
        random_state=SEED,
    )
    train_images, test_images, train_digits, test_digits = (part.to(device) for part in split)
    return Batch(train_images, train_digits), Batch(test_images, test_digits)


def shuffled(data: Batch, epochs: int, batch_size: int = 64) -> list[Batch]:
    """Return the batches of all epochs, so that both runs see the same ones."""
    generator = torch.Generator().manual_seed(SEED)
    orders = [torch.randperm(len(data.digits), generator=generator) for _ in range(epochs)]
    rows = [part for order in orders for part in torch.split(order, batch_size)]
    return [Batch(data.images[part], data.digits[part]) for part in rows]


def fresh_model(device: torch.device) -> MultiTask:
    """Return the model that both runs start from, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return MultiTask().to(device)


def train(
    start: MultiTask,
    batches: Sequence[Batch],
    step: Step,
    progress: Progress,
    name: str,
    callback: Callback = lambda *_: None,
) -> MultiTask:
    """Return a copy of `start`, trained on the batches in their order."""
    model = deepcopy(start)
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    task = progress.add_task(name, total=len(batches), status="")
    for index, batch in enumerate(batches):
        callback(index, model)
        values = step(model, optimizer, batch)
        losses = "  ".join(f"{loss} {value.item():.3f}" for loss, value in values.items())
        progress.update(task, advance=1, status=losses)
    callback(len(batches), model)
    return model


def train_both(
    data: Batch, size: Size, console: Console
) -> tuple[MultiTask, MultiTask, list[Snapshot]]:
    """Return the model of the usual loop, that of gradkit, and the conflicts during training."""
    start = fresh_model(data.images.device)
    batches = shuffled(data, size.epochs)
    snapshots: list[Snapshot] = []

    def callback(index: int, model: MultiTask) -> None:
        if index % size.measure_every == 0:
            snapshots.append(measure(index, model, data))

    with progress_on(console) as progress:
        usual = train(start, batches, usual_step, progress, "usual")
        ours = train(start, batches, gradkit_step, progress, "gradkit", callback)
    return usual, ours, snapshots


# --- The checks ----------------------------------------------------------------------------------


def differing_weights(a: nn.Module, b: nn.Module) -> list[str]:
    """Return the names of the weights that differ between two models in at least one bit."""
    others = b.state_dict()
    # As integers, because as floats 0.0 equals -0.0, and NaN does not equal itself.
    return [
        name
        for name, weight in a.state_dict().items()
        if not torch.equal(weight.view(torch.int32), others[name].view(torch.int32))
    ]


@torch.no_grad()
def accuracies(model: MultiTask, test: Batch) -> dict[str, float]:
    """Return the test accuracy of each of the two classifying heads."""
    outputs = model(test.images)
    right = {
        "digit": outputs["digit"].argmax(1) == test.digits,
        "parity": (outputs["parity"].squeeze(1) > 0) == (test.digits % 2 == 1),
    }
    return {name: hits.double().mean().item() for name, hits in right.items()}


def failed_checks(differing: Sequence[str], accuracy: float, least: float) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    if differing:
        failed.append(f"the weights of the two runs differ in {', '.join(differing)}")
    if accuracy <= least:
        failed.append(f"the digit head's test accuracy is {accuracy:.1%}, not above {least:.0%}")
    return failed


# --- Tables and pictures -------------------------------------------------------------------------


def record(snapshots: Sequence[Snapshot]) -> gradkit.report.History:
    """Return the conflicts as a record that prints and plots."""
    history = gradkit.report.History()
    for snapshot in snapshots:
        history.add_(snapshot.step, snapshot.conflicts)
    return history


def result_table(model: nn.Module, accuracy: dict[str, float], last: Snapshot) -> Table:
    """Return the results, one line each."""
    weights = list(model.parameters())
    count = sum(weight.numel() for weight in weights)
    norms = ", ".join(f"{name} {norm:.4f}" for name, norm in last.at_output.items())
    table = Table.grid(padding=(0, 2))
    table.add_row("weights", f"{len(weights)} tensors, {count:,} numbers, compared bit for bit")
    table.add_row("test accuracy", ", ".join(f"{n} {share:.1%}" for n, share in accuracy.items()))
    table.add_row("trunk's output", f"norms by safe_retain: {norms}")
    return table


def draw(history: gradkit.report.History, path: Path) -> None:
    """Save a picture of the norms and the cosines over training."""
    figure = blank_figure(9, 7)
    upper, lower = figure.subplots(2, sharex=True)
    history.plot(upper, what="norms").set_title("Norm of each loss's gradient", loc="left")
    history.plot(lower).set_title("Cosine between two losses' gradients", loc="left")
    save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    console = Console()
    data, test = load(size.images, options.device)
    usual, ours, snapshots = train_both(data, size, console)
    accuracy = accuracies(ours, test)
    picture = options.output / "multitask_digits.png"
    history = record(snapshots)
    draw(history, picture)

    console.print("Gradients of the losses at the trunk", history, sep="\n")
    console.print(result_table(ours, accuracy, snapshots[-1]))
    failed = failed_checks(differing_weights(usual, ours), accuracy["digit"], size.accuracy)
    return conclude(console, picture, failed, "the weights of the two runs are equal bit for bit")


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
