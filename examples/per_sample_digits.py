"""Finding wrong labels by the gradient of each sample.

A small network is trained on scikit-learn's handwritten digits, of which 2 % have a wrong label.
Images whose label contradicts the others have large gradients until the network has memorized them.
So after every epoch the gradient of each training image is computed, and the images are ranked by
its norm, averaged over the epochs.

    python examples/per_sample_digits.py [--smoke] [--device cuda] [--output folder]

Source: the GraNd score of Paul et al. 2021, "Deep Learning on a Data Diet: Finding Important
Examples Early in Training", https://arxiv.org/abs/2107.07075. There the mean is over networks that
start differently; here it is over the epochs of one training.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from _script import blank_figure, conclude, options_of, progress_on, save
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.optim import Adam, Optimizer

import gradkit

SEED = 0
LEARNING_RATE = 2e-3
FLIPPED = 0.02  # the share of the training labels that are made wrong
SHOWN = 10


class Data(NamedTuple):
    """Images of shape `[N, 1, 8, 8]` with values from 0 to 1, and their labels of shape `[N]`."""

    images: Tensor
    given: Tensor  # what the network is trained on
    true: Tensor  # not used in training

    @property
    def flipped(self) -> Tensor:
        """Whether the label is wrong, as a mask of shape `[N]`."""
        return self.given != self.true


def load(images: int, device: torch.device) -> tuple[Data, Data]:
    """Return the training set, of so many images and with wrong labels, and the test set."""
    pixels, digits = load_digits(return_X_y=True)
    train_images, test_images, train_digits, test_digits = train_test_split(
        torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16,
        torch.tensor(digits),
        train_size=images,
        test_size=450,
        stratify=digits,
        random_state=SEED,
    )
    train = Data(train_images, flip(train_digits), train_digits)
    test = Data(test_images, test_digits, test_digits)
    return Data(*(part.to(device) for part in train)), Data(*(part.to(device) for part in test))


def flip(digits: Tensor) -> Tensor:
    """Return the labels with a share of them, drawn at random, moved to another class."""
    generator = torch.Generator().manual_seed(SEED)
    count = round(FLIPPED * len(digits))
    rows = torch.randperm(len(digits), generator=generator)[:count]
    labels = digits.clone()
    # From 1 to 9 further round the ten classes, so that every one of them changes.
    labels[rows] = (labels[rows] + torch.randint(1, 10, (count,), generator=generator)) % 10
    return labels


def fresh_model(device: torch.device) -> nn.Module:
    """Return the network at its start, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # Not batch norm: it mixes the samples of a batch, so none has a separate gradient.
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        ).to(device)


# --- The gradient of every sample, batched and in a loop -----------------------------------------


def sample_norms(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return the norm of each image's gradient, and its loss, each `[N]`."""
    call, params, buffers = gradkit.func.make_functional(model)

    def loss_of_one(
        params: dict[str, Tensor], image: Tensor, label: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, _ = call(params, buffers, image[None])
        loss = functional.cross_entropy(logits, label[None])
        return loss, loss  # one to differentiate, one to return

    grads_of_each = gradkit.func.per_sample_grads(loss_of_one, has_aux=True, create_graph=False)
    grads, losses = grads_of_each(params, data.images, data.given)
    return vmap(squared_norm)(grads).sqrt(), losses


def squared_norm(tree: dict[str, Tensor]) -> Tensor:
    """Return the sum of the squares of all numbers in a tree."""
    return gradkit.tree.dot(tree, tree)


def looped_norms(model: nn.Module, data: Data) -> Tensor:
    """Return the same norms by a loop in plain torch, with one backward pass for each image."""
    norms = []
    for image, label in zip(data.images, data.given, strict=True):
        loss = functional.cross_entropy(model(image[None]), label[None])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm())
    return torch.stack(norms)


def difference_from_loop(model: nn.Module, data: Data, count: int) -> float:
    """Return the largest relative difference between the two, on the first images."""
    # In double precision, where rounding cannot hide a mistake.
    exact = deepcopy(model).double()
    few = Data(data.images[:count].double(), data.given[:count], data.true[:count])
    norms, _ = sample_norms(exact, few)
    expected = looped_norms(exact, few)
    return ((norms - expected).abs() / expected).max().item()


# --- Training, and the gradients of all samples after each epoch ---------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, on how much, how much to check, and the thresholds of the checks."""

    epochs: int
    images: int
    looped: int  # images whose norms a loop confirms
    precision: float  # the least, among as many images as are mislabelled


FULL = Size(epochs=20, images=1347, looped=32, precision=0.5)
SMOKE = Size(epochs=6, images=500, looped=4, precision=10 * FLIPPED)
TOLERANCE = 1e-9  # of a norm against the loop's, relatively


def train_epoch(
    model: nn.Module, optimizer: Optimizer, data: Data, generator: torch.Generator
) -> None:
    """Show the network every image once, with the label it was given."""
    order = torch.randperm(len(data.given), generator=generator)
    for rows in torch.split(order.to(data.given.device), 64):
        loss = functional.cross_entropy(model(data.images[rows]), data.given[rows])
        _, grads = gradkit.value_and_grads(loss, model)
        gradkit.step_(optimizer, model, grads)


def train(
    model: nn.Module, data: Data, epochs: int, console: Console
) -> tuple[list[Tensor], list[Tensor]]:
    """Train the network in place, and return the norms and losses of all images by epoch."""
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE)
    # Not the seed of the flips: their permutation would put all wrong labels into the first batch.
    generator = torch.Generator().manual_seed(SEED + 1)
    norms, losses = [], []
    with progress_on(console) as progress:
        task = progress.add_task("epoch", total=epochs, status="")
        for _ in range(epochs):
            train_epoch(model, optimizer, data, generator)
            norm, loss = sample_norms(model, data)
            norms.append(norm)
            losses.append(loss)
            status = f"mean loss {loss.mean().item():.3f}  mean norm {norm.mean().item():.2f}"
            progress.update(task, advance=1, status=status)
    return norms, losses


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        data: The training set.
        scores: By name a score `[N]`, the larger the more suspicious.
        accuracy: The test accuracy.
        difference: The largest relative difference of a norm from the loop.
    """

    data: Data
    scores: dict[str, Tensor]
    accuracy: float
    difference: float

    @property
    def norms(self) -> Tensor:
        """The mean norms `[N]`."""
        return self.scores["mean norm"]


def experiment(size: Size, device: torch.device, console: Console) -> Outcome:
    """Train on wrong labels, and score how suspicious each one is."""
    data, test = load(size.images, device)
    model = fresh_model(device)
    norms, losses = train(model, data, size.epochs, console)
    with torch.no_grad():
        right = model(test.images).argmax(1) == test.true
    return Outcome(
        data,
        scores={
            "mean norm": torch.stack(norms).mean(0),
            "last norm": norms[-1],
            "mean loss": torch.stack(losses).mean(0),
        },
        accuracy=right.double().mean().item(),
        difference=difference_from_loop(model, data, size.looped),
    )


# --- The checks ----------------------------------------------------------------------------------


def mislabelled(scores: Tensor, flipped: Tensor, k: int) -> int:
    """Return how many of the k largest scores are of mislabelled images."""
    return int(flipped[scores.topk(k).indices].sum())


def failed_checks(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    # Not `>`, which NaN would pass.
    if not outcome.difference <= TOLERANCE:
        failed.append(f"a norm differs from the loop's by {outcome.difference:.1e}, relatively")
    flipped = outcome.data.flipped
    count = int(flipped.sum())
    precision = mislabelled(outcome.norms, flipped, count) / count
    if not precision > size.precision:
        failed.append(f"precision at {count} is {precision:.1%}, not above {size.precision:.0%}")
    return failed


# --- Tables and pictures -------------------------------------------------------------------------


def precision_table(outcome: Outcome) -> Table:
    """Return precision and recall among the first k images, by score."""
    flipped = outcome.data.flipped
    count = int(flipped.sum())
    table = Table(title=f"How many of the first k are mislabelled ({count} of {len(flipped)} are)")
    precisions = (f"precision\n{name}" for name in outcome.scores)
    for heading in ("k", *precisions, "precision\nby chance", "recall\nmean norm"):
        table.add_column(heading, justify="right")
    for k in sorted({5, 10, 20, count, 2 * count}):
        table.add_row(
            str(k),
            *(f"{mislabelled(scores, flipped, k) / k:.0%}" for scores in outcome.scores.values()),
            f"{count / len(flipped):.0%}",
            f"{mislabelled(outcome.norms, flipped, k) / count:.0%}",
            style="bold" if k == count else None,
        )
    return table


def result_table(outcome: Outcome, size: Size) -> Table:
    """Return the results, one line each."""
    hits = mislabelled(outcome.norms, outcome.data.flipped, SHOWN)
    difference = f"largest relative difference {outcome.difference:.1e}"
    table = Table.grid(padding=(0, 2))
    table.add_row("largest norms", f"{hits} of the first {SHOWN} are mislabelled")
    table.add_row("against a loop", f"{difference} ({size.looped} images, float64)")
    table.add_row("test accuracy", f"{outcome.accuracy:.1%}")
    return table


def draw(outcome: Outcome, path: Path) -> None:
    """Save a picture of the images with the largest norms."""
    figure = blank_figure(10, 5)
    figure.suptitle(
        "The training images with the largest gradients (red: mislabelled)", fontweight="bold"
    )
    norms, rows = outcome.norms.topk(SHOWN)
    data = Data(*(part[rows].cpu() for part in outcome.data))
    for index, axes in enumerate(figure.subplots(2, SHOWN // 2).flat):
        show(axes, data, index, norms[index].item())
    save(figure, path)


def show(axes: Axes, data: Data, index: int, norm: float) -> None:
    """Draw one image, framed in red if its label is wrong."""
    color = "#d62728" if data.flipped[index] else "dimgray"
    given, true = data.given[index].item(), data.true[index].item()
    axes.imshow(data.images[index, 0].numpy(), cmap="gray_r", interpolation="bicubic")
    axes.set_title(f"given {given}, true {true}\nnorm {norm:.1f}", color=color)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=color, linewidth=3 if data.flipped[index] else 1)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    console = Console()
    outcome = experiment(size, options.device, console)
    picture = options.output / "per_sample_digits.png"
    draw(outcome, picture)

    console.print(precision_table(outcome), result_table(outcome, size), sep="\n")
    failed = failed_checks(outcome, size)
    summary = "the norms equal those of a loop, and find the wrong labels"
    return conclude(console, picture, failed, summary)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
