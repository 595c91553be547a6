"""DP-SGD on handwritten digits, with Opacus' accountant.

A network is trained on scikit-learn's digits by differentially private gradient descent: the
gradient of every image is clipped, `gradkit.clipped_sum` adds them up, and noise is added to the
sum. Opacus' accountant tells the privacy that this costs. On some of the batches, Opacus' ghost
clipping computes the sum, too, which must be equal to rounding; and no image may move a sum by more
than the largest norm.

    python examples/private_digits.py [--smoke] [--device cuda] [--output folder]

Needs Opacus: pip install opacus

Source: algorithm 1 of Abadi et al. 2016, "Deep Learning with Differential Privacy",
https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import gradkit

try:
    from opacus.accountants import RDPAccountant
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
except ImportError as error:
    raise ImportError("this example needs Opacus: pip install opacus") from error

SEED = 0
MAX_NORM = 1.0  # of the gradient of one image
BATCH = 128  # images that a step has on average: each is drawn by itself
LEARNING_RATE = 2.0
DELTA = 1e-4
TOLERANCE = 1e-6  # of a sum against Opacus', relatively, in float64


class Data(NamedTuple):
    """Images of shape `[N, 1, 8, 8]` with values from 0 to 1, and their digits of shape `[N]`."""

    images: Tensor
    digits: Tensor


def load(device: torch.device) -> tuple[Data, Data]:
    """Return the training set, of 1,347 images, and the test set, of 450."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    parts = train_test_split(
        images, torch.tensor(digits), test_size=450, stratify=digits, random_state=SEED
    )
    train_images, test_images, train_digits, test_digits = (part.to(device) for part in parts)
    return Data(train_images, train_digits), Data(test_images, test_digits)


def fresh_model(device: torch.device) -> nn.Module:
    """Return the network at its start, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        # Not batch norm: with it, one image would change the gradients of the others.
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, stride=2, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        ).to(device)


# --- The clipped sum, by gradkit and by Opacus ---------------------------------------------------


def losses_of(model: nn.Module, data: Data) -> Tensor:
    """Return the loss of each image, `[N]`."""
    return functional.cross_entropy(model(data.images), data.digits, reduction="none")


def clipped_sum(model: nn.Module, data: Data) -> dict[str, Tensor]:
    """Return the sum of the images' clipped gradients, without a gradient for each of them."""
    total: dict[str, Tensor] = gradkit.clipped_sum(losses_of(model, data), model, MAX_NORM)
    return total


def clipped_sum_by_opacus(model: nn.Module, data: Data) -> dict[str, Tensor | None]:
    """Return the same sum by ghost clipping: two backward passes, in a copy of the model."""
    copied = deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of Opacus' hooks
        ghost = GradSampleModuleFastGradientClipping(
            copied, max_grad_norm=MAX_NORM, loss_reduction="sum"
        )
        losses = losses_of(ghost, data)
        losses.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        factors = ghost.get_clipping_coef()
        ghost.disable_hooks()
        copied.zero_grad()
        (factors * losses).sum().backward()
    return {name: param.grad for name, param in copied.named_parameters()}


def in_double(model: nn.Module, data: Data) -> tuple[nn.Module, Data]:
    """Return both in double precision, where rounding cannot hide a mistake."""
    return deepcopy(model).double(), Data(data.images.double(), data.digits)


def difference_from_opacus(model: nn.Module, data: Data) -> float:
    """Return the distance of the two sums, relative to their norm."""
    exact = in_double(model, data)
    ours, theirs = clipped_sum(*exact), clipped_sum_by_opacus(*exact)
    distance = gradkit.tree.global_norm(gradkit.tree.sub(ours, theirs))
    return float(distance / gradkit.tree.global_norm(ours))


def sensitivity(model: nn.Module, data: Data) -> float:
    """Return by how much the first image moves the sum: at most `MAX_NORM`, whatever it shows."""
    exact, whole = in_double(model, data)
    rest = Data(whole.images[1:], whole.digits[1:])
    change = gradkit.tree.sub(clipped_sum(exact, whole), clipped_sum(exact, rest))
    return float(gradkit.tree.global_norm(change))


# --- Training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, with how much noise, and the thresholds of the checks.

    Attributes:
        steps: How many.
        noises: The standard deviations of the noise, in units of `MAX_NORM`; 0 is no privacy.
        checked: How many of the batches are compared with Opacus.
        accuracy: The least that the run with the first noise has on the test set.
    """

    steps: int
    noises: tuple[float, ...]
    checked: int
    accuracy: float


FULL = Size(steps=300, noises=(1.0, 2.0, 4.0, 0.0), checked=10, accuracy=0.85)
SMOKE = Size(steps=20, noises=(1.0, 0.0), checked=2, accuracy=0.2)


@dataclass
class Run:
    """One training.

    Attributes:
        noise: The standard deviation of its noise.
        epsilons: The privacy spent, with `DELTA`, after some of the steps; none without noise.
        accuracies: On the test set, after the same steps.
        steps: Their numbers.
        differences: Of sums from Opacus', where they were compared.
        moves: By how much one image has moved a sum.
    """

    noise: float
    epsilons: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)


def train(train_set: Data, test_set: Data, noise: float, size: Size, progress: Progress) -> Run:
    """Train a network with one standard deviation of the noise."""
    device = train_set.images.device
    model = fresh_model(device)
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)
    accountant: Any = RDPAccountant()
    rate = BATCH / len(train_set.digits)
    generator = torch.Generator().manual_seed(SEED)
    run = Run(noise)
    task = progress.add_task(f"noise {noise:g}", total=size.steps, status="")
    for step in range(size.steps):
        drawn = torch.rand(len(train_set.digits), generator=generator) < rate
        batch = Data(*(part[drawn.to(device)] for part in train_set))
        if step % (size.steps // size.checked) == 0:
            run.differences.append(difference_from_opacus(model, batch))
            run.moves.append(sensitivity(model, batch))
        total = clipped_sum(model, batch)
        noisy = gradkit.tree.map(
            lambda part: part + gaussian(part, noise * MAX_NORM, generator), total
        )
        gradkit.step_(optimizer, model, gradkit.tree.scale(noisy, 1 / BATCH))
        accountant.step(noise_multiplier=noise, sample_rate=rate)
        if (step + 1) % (size.steps // 10) == 0:
            run.steps.append(step + 1)
            run.accuracies.append(accuracy(model, test_set))
            if noise:
                run.epsilons.append(epsilon(accountant))
        progress.update(task, advance=1, status=status(run))
    return run


def gaussian(like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Return noise in the shape of a tensor."""
    return deviation * torch.randn(like.shape, generator=generator).to(like)


def epsilon(accountant: Any) -> float:
    """Return the privacy spent so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders at the end of their range
        return float(accountant.get_epsilon(delta=DELTA))


def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of the images that the network classifies rightly."""
    with torch.no_grad():
        right = model(data.images).argmax(1) == data.digits
    return float(right.double().mean())


def status(run: Run) -> str:
    """Return what stands behind the bar."""
    if not run.accuracies:
        return ""
    privacy = f"  epsilon {run.epsilons[-1]:.2f}" if run.epsilons else ""
    return f"accuracy {run.accuracies[-1]:.1%}{privacy}"


# --- The checks, the table and the picture -------------------------------------------------------


def failed_checks(runs: list[Run], size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    difference = max(max(run.differences) for run in runs)
    move = max(max(run.moves) for run in runs)
    # Not `>`, which NaN would pass.
    if not difference <= TOLERANCE:
        failed.append(f"a clipped sum differs from Opacus' by {difference:.1e}, relatively")
    if not move <= MAX_NORM * (1 + 1e-9):
        failed.append(f"an image has moved a sum by {move:.6f}, more than {MAX_NORM}")
    if not runs[0].accuracies[-1] > size.accuracy:
        failed.append(f"accuracy {runs[0].accuracies[-1]:.1%}, not above {size.accuracy:.0%}")
    return failed


def result_table(runs: list[Run]) -> Table:
    """Return the privacy and the accuracy of each run."""
    table = Table(title=f"After {runs[0].steps[-1]} steps (delta {DELTA:g})")
    for heading in ("noise", "epsilon", "test accuracy", "from Opacus'", "moved by an image"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            f"{run.noise:g}",
            f"{run.epsilons[-1]:.2f}" if run.epsilons else "-",
            f"{run.accuracies[-1]:.1%}",
            f"{max(run.differences):.0e}",
            f"{max(run.moves):.4f}",
        )
    return table


def draw(runs: list[Run], path: Path) -> None:
    """Save a picture of the accuracy over the steps, and over the privacy that they cost."""
    figure = blank_figure(10, 4)
    by_step, by_privacy = figure.subplots(1, 2, sharey=True)
    for run in runs:
        label = f"noise {run.noise:g}" if run.noise else "no noise"
        style = {} if run.noise else {"color": "gray", "linestyle": "--"}
        by_step.plot(run.steps, run.accuracies, label=label, **style)
        if run.noise:
            by_privacy.plot(run.epsilons, run.accuracies, label=label)
    by_step.set(xlabel="step", ylabel="test accuracy")
    by_privacy.set(xlabel=f"epsilon spent, at delta {DELTA:g} (log scale)", xscale="log")
    tidy(by_step, "DP-SGD on handwritten digits")
    tidy(by_privacy, "The same, over the privacy that it costs")
    save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    console = Console()
    train_set, test_set = load(options.device)
    with progress_on(console) as progress:
        runs = [train(train_set, test_set, noise, size, progress) for noise in size.noises]
    picture = options.output / "private_digits.png"
    draw(runs, picture)

    console.print(result_table(runs))
    summary = "the clipped sums equal Opacus', and no image moves one by more than the largest norm"
    return conclude(console, picture, failed_checks(runs, size), summary)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
