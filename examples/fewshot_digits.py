"""Classifying digits after five examples of each.

A small network is meta-trained on scikit-learn's handwritten digits from 0 to 6. Then it gets five
images each of 7, 8 and 9, which it has not seen before, takes three steps of gradient descent on
them, and classifies other images of these digits. Every image is placed at random on a larger
canvas, so that comparing pixels is not enough. Three initializations are compared:

- MAML: initial weights that were learned by differentiating through the three steps.
- pretrained: a classifier of the digits from 0 to 6 with a new last layer, trained on the same
  number of images.
- random: no training before the five images.

MAML uses the step size that it was trained with; the other two are tried with several. All are also
evaluated after ten steps, for which MAML was not trained.

    python examples/fewshot_digits.py [--smoke] [--device cuda] [--output folder]

Source: Finn et al. 2017, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks",
algorithm 2 and section 5.2, https://arxiv.org/abs/1703.03400; the tasks are drawn as in Vinyals et
al. 2016, "Matching Networks for One Shot Learning", https://arxiv.org/abs/1606.04080.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.optim import Adam

import gradkit

SEED = 0
TRAIN_DIGITS = (0, 1, 2, 3, 4, 5, 6)
TEST_DIGITS = (7, 8, 9)
WAYS = 3  # classes in a task
SHOTS = 5  # images of each that are shown
QUERIES = 5  # and others of each, for the meta-loss
CANVAS = 12  # pixels; the images have 8
STEPS = 3  # of the inner gradient descent
STEP_SIZE = 0.3
META_LEARNING_RATE = 3e-3
TASKS_AT_A_TIME = 4  # in one meta-batch
LONGEST = 10  # inner steps, when the accuracy over steps is measured
BATCH = 64  # images, in pretraining
STEP_SIZES = (0.03, 0.1, 0.3)  # for the starts that were not trained with one


class Examples(NamedTuple):
    """Images `[..., N, 1, CANVAS, CANVAS]`, values from 0 to 1, and their classes `[..., N]`."""

    images: Tensor
    classes: Tensor


class Task(NamedTuple):
    """The support and query images. A batch of tasks has a first dimension more."""

    support: Examples
    query: Examples


# --- The tasks -----------------------------------------------------------------------------------


def load(device: torch.device) -> list[Tensor]:
    """Return, for each digit, its images at every place of the canvas: `[N, places, 1, C, C]`."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device).reshape(-1, 1, 8, 8) / 16
    free = CANVAS - 8
    margins = [(x, free - x, y, free - y) for x in range(free + 1) for y in range(free + 1)]
    placed = torch.stack([functional.pad(images, margin) for margin in margins], 1)
    of = torch.tensor(digits, device=device)
    return [placed[of == digit] for digit in range(10)]


def draw_tasks(
    by_digit: Sequence[Tensor],
    digits: Sequence[int],
    count: int,
    queries: int,
    generator: torch.Generator,
) -> Task:
    """Return tasks, stacked, each of some of the digits, in random order and at random places."""
    each = SHOTS + queries  # images of a class
    images = torch.stack([
        torch.stack([
            draw_images(by_digit[digits[index]], each, generator)
            for index in torch.randperm(len(digits), generator=generator)[:WAYS].tolist()
        ])
        for _ in range(count)
    ])  # [count, WAYS, each, 1, CANVAS, CANVAS]
    # The label of a digit depends on the task, so that it cannot be memorized.
    classes = torch.arange(WAYS, device=images.device)[:, None].expand(count, WAYS, each)
    support = Examples(images[:, :, :SHOTS].flatten(1, 2), classes[:, :, :SHOTS].flatten(1))
    query = Examples(images[:, :, SHOTS:].flatten(1, 2), classes[:, :, SHOTS:].flatten(1))
    return Task(support, query)


def draw_images(images: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return different images, each at a random place: `[count, 1, CANVAS, CANVAS]`."""
    rows = torch.randperm(len(images), generator=generator)[:count]
    return images[rows, torch.randint(images.shape[1], (count,), generator=generator)]


# --- The network, and how it is trained ----------------------------------------------------------


def network(classes: int) -> nn.Module:
    """Return the network before any training, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (CANVAS // 4) ** 2, classes),
        )


class Learner:
    """The network of the tasks as functions of its weights."""

    def __init__(self, device: torch.device) -> None:
        self._call, self.start, self._buffers = gradkit.func.make_functional(
            network(WAYS).to(device)
        )

    def logits(self, weights: Any, images: Tensor) -> Tensor:
        """Return the logits of the network with these weights."""
        out: Tensor = self._call(weights, self._buffers, images)[0]
        return out

    def loss(self, weights: Any, _: Any, examples: Examples) -> Tensor:
        """Return the cross-entropy. It has no outer variables."""
        return functional.cross_entropy(self.logits(weights, examples.images), examples.classes)

    def meta_loss(self, weights: Any, task: Task) -> Tensor:
        """Return the loss on the query images, after some steps on the support images."""
        opt = gradkit.meta.sgd(lr=STEP_SIZE)
        adapted = gradkit.meta.unroll(self.loss, weights, [task.support] * STEPS, opt)
        return self.loss(adapted.params, (), task.query)

    @torch.no_grad()
    def accuracies(self, weights: Any, tasks: Task, step_size: float) -> Tensor:
        """Return the accuracy on each task after 0, 1, ... steps: `[tasks, LONGEST + 1]`."""

        def loss_and_accuracy(weights: Any, _: Any, task: Task) -> tuple[Tensor, Tensor]:
            right = self.logits(weights, task.query.images).argmax(1) == task.query.classes
            return self.loss(weights, (), task.support), right.float().mean()

        def of_one(task: Task) -> Tensor:
            # The aux of a step is computed before the step: one more shows all.
            batches = [task] * (LONGEST + 1)
            opt = gradkit.meta.sgd(lr=step_size)
            run = gradkit.meta.unroll(loss_and_accuracy, weights, batches, opt, has_aux=True)
            return torch.stack([accuracy for accuracy in run.aux if isinstance(accuracy, Tensor)])

        by_step: Tensor = vmap(of_one, chunk_size=50)(tasks)
        return by_step


def meta_train(
    learner: Learner, by_digit: Sequence[Tensor], iterations: int, progress: Progress
) -> dict[str, Tensor]:
    """Return initial weights, learned over tasks of the training digits."""
    weights = {name: w.detach().clone().requires_grad_() for name, w in learner.start.items()}
    optimizer = Adam(weights.values(), lr=META_LEARNING_RATE)
    generator = torch.Generator().manual_seed(SEED)
    bar = progress.add_task("MAML", total=iterations, status="")
    values = []
    for _ in range(iterations):
        tasks = draw_tasks(by_digit, TRAIN_DIGITS, TASKS_AT_A_TIME, QUERIES, generator)
        value, grads = gradkit.meta.mean_value_and_grads(
            learner.meta_loss, weights, tasks, create_graph=False
        )
        gradkit.step_(optimizer, weights, grads)
        values.append(value.item())
        recent = values[-20:]
        status = f"meta-loss {sum(recent) / len(recent):.3f}"
        progress.update(bar, advance=1, status=status)
    return weights


def pretrain(
    learner: Learner, by_digit: Sequence[Tensor], iterations: int, progress: Progress
) -> dict[str, Tensor]:
    """Return weights of a classifier of the training digits, with a new last layer."""
    device = by_digit[0].device
    model = network(len(TRAIN_DIGITS)).to(device)
    optimizer = Adam(model.parameters(), lr=META_LEARNING_RATE)
    generator = torch.Generator().manual_seed(SEED)
    images = torch.cat([by_digit[digit] for digit in TRAIN_DIGITS])
    classes = torch.cat([
        torch.full((len(by_digit[digit]),), index, device=device)
        for index, digit in enumerate(TRAIN_DIGITS)
    ])
    # As many images as the meta-training sees.
    batches = iterations * TASKS_AT_A_TIME * WAYS * (SHOTS + QUERIES) // BATCH
    bar = progress.add_task("pretrained", total=batches, status="")
    for _ in range(batches):
        rows = torch.randint(len(images), (BATCH,), generator=generator)
        places = torch.randint(images.shape[1], (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(images[rows, places]), classes[rows])
        _, grads = gradkit.value_and_grads(loss, model)
        gradkit.step_(optimizer, model, grads)
        progress.update(bar, advance=1, status=f"loss {loss.item():.3f}")
    trained = {name: weight.detach() for name, weight in model.named_parameters()}
    # The last layer has other classes: it starts with zeros, which prefer none of them.
    return {
        name: trained[name] if trained[name].shape == start.shape else torch.zeros_like(start)
        for name, start in learner.start.items()
    }


@torch.no_grad()
def nearest_neighbour(tasks: Task) -> Tensor:
    """Return the accuracy on each task `[tasks]` of taking the class of the most similar image."""
    support, query = (examples.images.flatten(2) for examples in tasks)
    nearest = torch.cdist(query, support).argmin(2)
    right = tasks.support.classes.gather(1, nearest) == tasks.query.classes
    return right.float().mean(1)


# --- The run, and its checks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, on how many tasks to test, and the thresholds of the checks."""

    iterations: int
    tests: int
    queries: int  # images of each class in a test task
    gain: float  # what the steps must add to the accuracy of MAML
    lead: float  # of MAML over any other start with as many steps


FULL = Size(iterations=350, tests=100, queries=10, gain=0.25, lead=0.08)
SMOKE = Size(iterations=20, tests=10, queries=5, gain=0.0, lead=-1.0)


@dataclass(frozen=True)
class Outcome:
    """The accuracies `[tasks, LONGEST + 1]` from one initialization, with this step size."""

    name: str
    step_size: float
    accuracies: Tensor

    @property
    def means(self) -> Tensor:
        """The mean accuracy by step: `[LONGEST + 1]`."""
        return self.accuracies.mean(0)


@dataclass(frozen=True)
class Experiment:
    """The results of a run."""

    starts: list[Outcome]  # MAML first
    neighbour: Tensor  # accuracies `[tasks]` without a network
    learner: Learner
    weights: dict[str, Tensor]  # of MAML
    tests: Task


def experiment(size: Size, device: torch.device, console: Console) -> Experiment:
    """Train, and test every initialization on the same tasks of new digits."""
    by_digit = load(device)
    generator = torch.Generator().manual_seed(SEED + 1)
    tests = draw_tasks(by_digit, TEST_DIGITS, size.tests, size.queries, generator)
    learner = Learner(device)
    with progress_on(console) as progress:
        learned = meta_train(learner, by_digit, size.iterations, progress)
        pretrained = pretrain(learner, by_digit, size.iterations, progress)
        starts: list[tuple[str, Any, float]] = [
            ("MAML", learned, STEP_SIZE),
            *(("pretrained", pretrained, step_size) for step_size in STEP_SIZES),
            *(("random", learner.start, step_size) for step_size in STEP_SIZES),
        ]
        bar = progress.add_task("testing", total=len(starts), status="")
        outcomes = [
            Outcome(name, step_size, learner.accuracies(weights, tests, step_size))
            for name, weights, step_size in progress.track(starts, task_id=bar)
        ]
    return Experiment(outcomes, nearest_neighbour(tests), learner, learned, tests)


def failed_checks(outcome: Experiment, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    maml, *others = outcome.starts
    after = maml.means[STEPS].item()
    gain = after - maml.means[0].item()
    # Not `<=`, which NaN would pass.
    if not gain > size.gain:
        failed.append(f"{STEPS} steps add {gain:.1%} to MAML's accuracy, not above {size.gain:.0%}")
    rivals = {f"{o.name}, step size {o.step_size:g},": o.means[: STEPS + 1].max() for o in others}
    rivals["nearest neighbour"] = outcome.neighbour.mean()
    for name, best in rivals.items():
        lead = after - best.item()
        if not lead > size.lead:
            failed.append(f"MAML leads {name} by {lead:.1%} of accuracy, not above {size.lead:.0%}")
    return failed


# --- Tables and pictures -------------------------------------------------------------------------


COLORS = {"MAML": "#0072b2", "pretrained": "#d55e00", "random": "#009e73"}


def interval(accuracies: Tensor) -> str:
    """Return the mean over tasks `[tasks]` in percent, and its 95 % confidence interval."""
    margin = 1.96 * accuracies.std().item() / math.sqrt(len(accuracies))
    return f"{100 * accuracies.mean().item():.1f} ± {100 * margin:.1f}"


def accuracy_table(outcome: Experiment) -> Table:
    """Return the accuracy from each initialization, after some steps."""
    digits = ", ".join(map(str, TEST_DIGITS))
    count = len(outcome.neighbour)
    table = Table(title=f"Accuracy in % on {count} tasks of the new digits {digits}")
    table.add_column("start")
    for heading in ("step size", "before", "1 step", f"{STEPS} steps", f"{LONGEST} steps"):
        table.add_column(heading, justify="right")
    for one in outcome.starts:
        cells = (interval(one.accuracies[:, step]) for step in (0, 1, STEPS, LONGEST))
        style = "bold" if one is outcome.starts[0] else None
        table.add_row(one.name, f"{one.step_size:g}", *cells, style=style)
    table.add_row("nearest neighbour", "", interval(outcome.neighbour), "", "", "", style="dim")
    table.caption = (
        f"{WAYS}-way {SHOTS}-shot; ±: 95 % confidence, over draws of images (not of digits, nor of "
        "training runs)"
    )
    return table


def draw(outcome: Experiment, path: Path) -> None:
    """Save a picture of the accuracy over steps, and of one task."""
    figure = blank_figure(11, 4.5)
    grid = figure.add_gridspec(1, 2, width_ratios=(5, 6))
    draw_curves(figure.add_subplot(grid[0]), outcome)
    draw_task(figure.add_subfigure(grid[1]), outcome)
    save(figure, path)


def draw_curves(axes: Axes, outcome: Experiment) -> None:
    """Draw the accuracy over steps, each with the step size that is best after the last step."""
    steps = range(LONGEST + 1)
    for name, color in COLORS.items():
        candidates = (one for one in outcome.starts if one.name == name)
        one = max(candidates, key=lambda one: one.means[LONGEST].item())
        margins = 1.96 * one.accuracies.std(0) / math.sqrt(len(one.accuracies))
        low, high = (one.means - margins).cpu(), (one.means + margins).cpu()
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        label = f"{name} (step size {one.step_size:g})"
        axes.plot(steps, one.means.cpu(), color=color, marker="o", label=label)
    neighbour = outcome.neighbour.mean().item()
    axes.axhline(neighbour, color="black", linestyle="--", label="nearest neighbour")
    axes.axhline(1 / WAYS, color="dimgray", linestyle=":", label="chance")
    axes.axvline(STEPS, color="dimgray", linewidth=0.5)
    axes.set(xlabel="inner steps", ylabel="accuracy", ylim=(0.25, 1))
    tidy(axes, "Accuracy on new digits", loc="upper right")


def draw_task(figure: SubFigure, outcome: Experiment) -> None:
    """Draw the first task: the support images, and some query images with MAML's answers."""
    support, query = (
        Examples(examples.images[0], examples.classes[0]) for examples in outcome.tests
    )
    opt = gradkit.meta.sgd(lr=STEP_SIZE)
    adapted = gradkit.meta.unroll(
        outcome.learner.loss, outcome.weights, [support] * STEPS, opt, first_order=True
    )
    answers = outcome.learner.logits(adapted.params, query.images).argmax(1).tolist()
    asked = len(query.classes) // WAYS
    figure.suptitle(
        f"One task: {SHOTS} of each class; MAML's answers ({STEPS} steps)", fontweight="bold"
    )
    for row, line in enumerate(figure.subplots(WAYS, 2 * SHOTS)):
        line[0].set_ylabel(f"class {row}", fontsize="large")
        for column, axes in enumerate(line):
            shown = column < SHOTS
            index = row * (SHOTS if shown else asked) + column % SHOTS
            image = (support if shown else query).images[index, 0]
            axes.imshow(image.cpu().numpy(), cmap="gray_r")
            axes.set(xticks=[], yticks=[])
            if not shown:
                color = "#009e73" if answers[index] == row else "#d62728"
                axes.set_title(str(answers[index]), color=color, fontweight="bold")
                axes.spines[:].set(color=color, linewidth=3)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    console = Console()
    outcome = experiment(size, options.device, console)
    picture = options.output / "fewshot_digits.png"
    draw(outcome, picture)

    console.print(accuracy_table(outcome))
    failed = failed_checks(outcome, size)
    summary = "three steps from the learned initialization beat those from the others"
    return conclude(console, picture, failed, summary)


if __name__ == "__main__":
    # With images this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
