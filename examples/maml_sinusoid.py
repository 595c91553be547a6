"""Fitting a new sine wave from ten points.

A network fits a sine wave that it has not seen before, given ten points and one step of gradient
descent. It can if its initial weights were learned for that purpose: the error after the step is
differentiated through the step. Three methods, on the benchmark of Finn et al.:

- MAML learns the initial weights with the gradient through the step, second derivatives included.
- FOMAML learns them too, but treats the inner gradient as a constant.
- Meta-SGD also learns a step size for every weight; step sizes may become negative.

All are trained for one step. The table also has the errors after more steps: Meta-SGD's step sizes
are so large that further steps overshoot.

    python examples/maml_sinusoid.py [--smoke] [--iterations n] [--device cuda] [--output folder]

Source: Finn et al. 2017, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks",
section 5.1 (the benchmark) and 5.2 (the first-order variant), https://arxiv.org/abs/1703.03400, and
its official code, https://github.com/cbfinn/maml; Li et al. 2017, "Meta-SGD: Learning to Learn
Quickly for Few-Shot Learning", https://arxiv.org/abs/1707.09835.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.optim import Adam

import gradkit

SEED = 0
SHOTS = 10
STEP_SIZE = 0.01  # of the inner gradient descent
META_LEARNING_RATE = 1e-3
TASKS_AT_A_TIME = 25  # in one meta-batch
LONGEST = 10  # inner steps, when the error over steps is measured
SHOWN = (0, 1, 5, 10)
POINTS = 100  # of a test task, on which the error is measured
# Predicting 0 everywhere errs by less: the square of the largest amplitude.
DIVERGED = 25.0


class Points(NamedTuple):
    """Some points of a sine wave: `x` and `y`, each `[..., points, 1]`."""

    x: Tensor
    y: Tensor


class Task(NamedTuple):
    """A sine wave: the points that are shown, and others of it. With a first dimension, many."""

    support: Points
    query: Points


def draw_tasks(count: int, queries: int, generator: torch.Generator, device: torch.device) -> Task:
    """Return sine waves of random amplitude and phase, stacked, with random points of each."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = low + (high - low) * torch.rand(*shape, generator=generator)
        return drawn.to(device)

    amplitude = uniform(0.1, 5.0, count, 1, 1)
    phase = uniform(0.0, math.pi, count, 1, 1)
    xs = (uniform(-5.0, 5.0, count, points, 1) for points in (SHOTS, queries))
    support, query = (Points(x, amplitude * torch.sin(x - phase)) for x in xs)
    return Task(support, query)


# --- The inner loop, and three methods to learn its initial weights ------------------------------

Params: TypeAlias = dict[str, Any]  # what is meta-learned: trees of tensors by name


@dataclass(frozen=True)
class Method:
    """A meta-learning method.

    Attributes:
        name: Its name.
        color: Its color in the picture.
        first_order: Treat the inner gradients as constants.
        learns_step_sizes: Learn the step size of every weight, too.
    """

    name: str
    color: str
    first_order: bool = False
    learns_step_sizes: bool = False

    def start(self, model: nn.Module, device: torch.device) -> Params:
        """Return what is meta-learned, before training."""
        weights = dict(model.to(device).named_parameters())
        if not self.learns_step_sizes:
            return {"weights": weights}
        sizes = gradkit.tree.map(lambda w: torch.full_like(w, STEP_SIZE).requires_grad_(), weights)
        return {"weights": weights, "step sizes": sizes}


METHODS = (
    Method("MAML", "#0072b2"),
    Method("FOMAML", "#d55e00", first_order=True),
    Method("Meta-SGD", "#009e73", learns_step_sizes=True),
)


def network() -> nn.Module:
    """Return the network before any training, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
        )


def predicted(weights: Any, x: Tensor) -> Tensor:
    """Return the output of the network with these weights."""
    # Written out, because on a network this small `make_functional` costs more than the network.
    x = functional.linear(x, weights["0.weight"], weights["0.bias"]).relu()
    x = functional.linear(x, weights["2.weight"], weights["2.bias"]).relu()
    return functional.linear(x, weights["4.weight"], weights["4.bias"])


def error(weights: Any, _: Any, points: Points) -> Tensor:
    """Return the mean squared error. It has no outer variables."""
    return functional.mse_loss(predicted(weights, points.x), points.y)


def inner_optimizer(params: Params) -> gradkit.meta.Optimizer:
    """Return gradient descent with the learned step sizes, or the fixed one."""
    # A tree with a tensor of each weight's shape: a step size for every number.
    return gradkit.meta.sgd(lr=params.get("step sizes", STEP_SIZE))


def adapted(params: Params, support: Points, steps: int, *, first_order: bool) -> Any:
    """Return the weights after some steps on the points that are shown."""
    batches = [support] * steps
    opt = inner_optimizer(params)
    run = gradkit.meta.unroll(error, params["weights"], batches, opt, first_order=first_order)
    return run.params


def meta_train(
    method: Method, size: Size, device: torch.device, progress: Progress
) -> tuple[Params, list[float]]:
    """Return what a method learns, and its meta-losses on the way."""

    def meta_loss(params: Params, task: Task) -> Tensor:
        """The error on other points of the wave, after one step on those that are shown."""
        weights = adapted(params, task.support, 1, first_order=method.first_order)
        return error(weights, (), task.query)

    params = method.start(network(), device)
    optimizer = Adam([w for tree in params.values() for w in tree.values()], lr=META_LEARNING_RATE)
    generator = torch.Generator().manual_seed(SEED)  # every method sees the same tasks
    bar = progress.add_task(method.name, total=size.iterations, status="")
    values = []
    for _ in range(size.iterations):
        tasks = draw_tasks(TASKS_AT_A_TIME, SHOTS, generator, device)
        value, grads = gradkit.meta.mean_value_and_grads(
            meta_loss, params, tasks, create_graph=False
        )
        gradkit.step_(optimizer, params, grads)
        values.append(value.item())
        recent = values[-100:]
        status = f"error after one step {sum(recent) / len(recent):.2f}"
        progress.update(bar, advance=1, status=status)
    return params, values


# --- How well it adapts to new waves -------------------------------------------------------------


@torch.no_grad()
def errors_by_step(params: Params, tasks: Task) -> Tensor:
    """Return the error on each task after 0, 1, ..., `LONGEST` steps: `[tasks, LONGEST + 1]`."""

    def seen_and_unseen(weights: Any, _: Any, task: Task) -> tuple[Tensor, Tensor]:
        return error(weights, (), task.support), error(weights, (), task.query)

    def of_one(task: Task) -> Tensor:
        # The aux of a step is computed before the step: one more shows all.
        batches = [task] * (LONGEST + 1)
        run = gradkit.meta.unroll(
            seen_and_unseen, params["weights"], batches, inner_optimizer(params), has_aux=True
        )
        return torch.stack([unseen for unseen in run.aux if isinstance(unseen, Tensor)])

    by_step: Tensor = vmap(of_one)(tasks)
    return by_step


def mean_and_margin(errors: Tensor) -> tuple[float, float]:
    """Return the mean over tasks `[tasks]`, and half the width of its 95 % confidence interval."""
    return errors.mean().item(), 1.96 * errors.std().item() / math.sqrt(len(errors))


def diverged(errors: Tensor) -> float:
    """Return the share of tasks `[tasks]` on which predicting 0 would have been better."""
    # Not `>`, which is false for NaN.
    return (~(errors <= DIVERGED)).double().mean().item()


# --- The run, and its checks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to train, on how many tasks to test, and the thresholds of the checks."""

    iterations: int
    tests: int
    one_step: float  # the largest share of the error left after one step, for every method
    ten_steps: float  # and after ten, where the step size is fixed


FULL = Size(iterations=1200, tests=600, one_step=0.75, ten_steps=0.6)
SMOKE = Size(iterations=150, tests=200, one_step=1.0, ten_steps=1.0)


@dataclass(frozen=True)
class Learned:
    """What a method has learned: its meta-losses, and its errors on the test tasks by step."""

    method: Method
    params: Params
    values: list[float]
    errors: Tensor  # [tasks, LONGEST + 1]


def experiment(size: Size, device: torch.device, console: Console) -> list[Learned]:
    """Train every method, and test it on the same new tasks."""
    tests = draw_tasks(size.tests, POINTS, torch.Generator().manual_seed(SEED + 1), device)
    outcomes = []
    with progress_on(console) as progress:
        for method in METHODS:
            params, values = meta_train(method, size, device, progress)
            outcomes.append(Learned(method, params, values, errors_by_step(params, tests)))
    return outcomes


def failed_checks(outcomes: Sequence[Learned], size: Size) -> list[str]:
    """Return one message for each check that failed."""
    failed = []
    for one in outcomes:
        most = {1: size.one_step}
        if not one.method.learns_step_sizes:
            most[LONGEST] = size.ten_steps
        means = one.errors.mean(0)
        for step, limit in most.items():
            left = (means[step] / means[0]).item()
            # Not `>=`, which NaN would pass.
            if not left < limit:
                failed.append(
                    f"{one.method.name} leaves {left:.0%} of the error after {step} step(s), "
                    f"not less than {limit:.0%}"
                )
    return failed


# --- Tables and pictures -------------------------------------------------------------------------


def errors_table(outcomes: Sequence[Learned]) -> Table:
    """Return the error of each method after some steps."""
    count = len(outcomes[0].errors)
    table = Table(title=f"Mean squared error on {count} new tasks, with 95 % confidence interval")
    table.add_column("")
    for step in SHOWN:
        heading = f"after {step} step{'s' if step > 1 else ''}" if step else "before"
        table.add_column(heading, justify="right")
    for one in outcomes:
        table.add_row(one.method.name, *(cell(one.errors[:, step]) for step in SHOWN))
    table.caption = (
        "±: over tasks, not over training runs; "
        f"diverges: larger than {DIVERGED:g} on more than 1 % of the tasks"
    )
    return table


def cell(errors: Tensor) -> str:
    """Return mean and confidence interval, or how often it diverges."""
    share = diverged(errors)
    if share > 0.01:
        return f"[red]diverges on {share:.0%}"
    mean, margin = mean_and_margin(errors)
    return f"{mean:.3f} ± {margin:.3f}"


def setting_table(size: Size) -> Table:
    """Return the published setting, and that of this run."""
    table = Table(title="The setting")
    for heading in ("", "published", "here"):
        table.add_column(heading)
    table.add_row("points of a task shown", "10", str(SHOTS))
    table.add_row("network", "1-40-40-1, ReLU", "the same")
    table.add_row("its first weights", "normal, 0.01", "torch's default")
    table.add_row("inner steps in training", "1, of 0.01", f"1, of {STEP_SIZE:g}")
    table.add_row("meta-optimizer", "Adam, 1e-3", f"Adam, {META_LEARNING_RATE:g}")
    table.add_row("tasks in a meta-batch", "25", str(TASKS_AT_A_TIME))
    table.add_row("meta-iterations", "70,000", f"{size.iterations:,}")
    table.add_row("test tasks", "600", str(size.tests))
    table.caption = "published: the paper, section 5.1, and the defaults of its official code"
    return table


def draw(outcomes: Sequence[Learned], path: Path) -> None:
    """Save a picture of the errors by step, and of one wave before and after."""
    figure = blank_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for one in outcomes:
        draw_errors(left, one)
    left.set(yscale="log", xlabel="inner steps", ylabel="mean squared error", ylim=(None, DIVERGED))
    left.yaxis.set_major_formatter("{x:g}")
    left.axvline(1, color="dimgray", linestyle=":", linewidth=1)
    tidy(left, f"Error on {len(outcomes[0].errors)} new waves (trained for one step)")
    draw_fit(right, outcomes[0])
    tidy(right, f"One new wave, by {outcomes[0].method.name}")
    save(figure, path)


def draw_errors(axes: Axes, one: Learned) -> None:
    """Draw the mean error by step, until it diverges, and its confidence interval."""
    steps = [step for step in range(LONGEST + 1) if diverged(one.errors[:, step]) <= 0.01]
    means, margins = zip(*(mean_and_margin(one.errors[:, step]) for step in steps), strict=True)
    name = one.method.name if len(steps) > LONGEST else f"{one.method.name} (then diverges)"
    axes.errorbar(
        steps, means, yerr=margins, color=one.method.color, label=name, marker="o", capsize=3
    )


@torch.no_grad()
def draw_fit(axes: Axes, one: Learned) -> None:
    """Draw a wave, the points of it that are shown, and the network before and after."""
    device = one.errors.device
    tasks = draw_tasks(1, POINTS, torch.Generator().manual_seed(SEED + 2), device)
    support, query = (Points(points.x[0], points.y[0]) for points in tasks)
    order = query.x.squeeze(1).argsort()
    line = query.x[order]
    axes.plot(line.cpu(), query.y[order].cpu(), color="black", linewidth=1, label="the wave")
    axes.plot(support.x.cpu(), support.y.cpu(), "^", color="black", label="points shown")
    for steps, style in ((0, ":"), (1, "--"), (LONGEST, "-")):
        weights = one.params["weights"]
        if steps:
            weights = adapted(one.params, support, steps, first_order=True)
        label = f"after {steps}" if steps else "before"
        y = predicted(weights, line).cpu()
        axes.plot(line.cpu(), y, style, color=one.method.color, label=label, linewidth=2)
    axes.set(xlabel="x")


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    parser = options_of(__doc__)
    parser.add_argument("--iterations", type=int, help=f"default: {FULL.iterations}")
    options = parser.parse_args(argv)
    size = SMOKE if options.smoke else FULL
    if options.iterations is not None:
        size = replace(size, iterations=options.iterations)
    console = Console()
    outcomes = experiment(size, options.device, console)
    picture = options.output / "maml_sinusoid.png"
    draw(outcomes, picture)

    console.print(errors_table(outcomes), setting_table(size), sep="\n")
    failed = failed_checks(outcomes, size)
    return conclude(console, picture, failed, "every method adapts to new waves")


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
