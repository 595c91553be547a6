"""Weight decay and learning rate, learned by gradient descent instead of searched.

A linear model of scikit-learn's diabetes data, with the products of features added, has 64 weights
and 120 patients to fit them to, so it needs weight decay. The validation set decides how much.
Three methods to find it:

- unrolled: train for 40 steps of gradient descent, and differentiate the validation loss through
  all of them, with respect to the weight decay and the learning rate.
- implicit: train to the minimum, and differentiate there, independently of how it was reached. So
  there is no learning rate to learn, but 64 weight decays, one for each weight, cost no more than
  one. (They also fit the validation set: compare the test set.)
- a grid search, for comparison.

Ridge regression has a closed form, and so has its hypergradient: both methods must converge to it
as they train longer. The gradient with respect to the learning rate is compared with finite
differences.

    python examples/learn_hyperparams.py [--smoke] [--device cuda] [--output folder]

Source: Maclaurin et al. 2015, "Gradient-based Hyperparameter Optimization through Reversible
Learning", https://arxiv.org/abs/1502.03492, for the first; Lorraine et al. 2020, "Optimizing
Millions of Hyperparameters by Implicit Differentiation", https://arxiv.org/abs/1911.02590, for the
second; Efron et al. 2004, "Least Angle Regression", https://arxiv.org/abs/math/0406456, for the
data and its products of features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from _script import blank_figure, conclude, options_of, progress_on, save, tidy
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

import gradkit

SEED = 0
STEPS = 40  # of the inner loop that is unrolled
META_LEARNING_RATE = 0.15
START_DECAY = 0.01
START_RATE = 0.01
RESIDUAL = 1e-10  # of the linear system that implicit differentiation solves


class Data(NamedTuple):
    """Features `[N, F]` and targets `[N]`, both standardized by the training set, in float64."""

    x: Tensor
    y: Tensor


class Split(NamedTuple):
    """The patients, in three parts."""

    train: Data
    validation: Data
    test: Data


def load(device: torch.device) -> Split:
    """Return the three parts."""
    features, target = load_diabetes(return_X_y=True)
    x = torch.tensor(features, dtype=torch.float64, device=device)
    # The square of one of them, the sex, is the sex again; as in Efron et al., it is left out.
    i, j = torch.triu_indices(10, 10).unbind()
    used = ~((i == 1) & (j == 1))
    x = torch.cat([x, x[:, i[used]] * x[:, j[used]]], 1)
    y = torch.tensor(target, dtype=torch.float64, device=device)
    first, rest = train_test_split(range(len(y)), train_size=120, random_state=SEED)
    second, third = train_test_split(rest, train_size=161, random_state=SEED)
    mean, deviation = x[first].mean(0), x[first].std(0)
    centre, spread = y[first].mean(), y[first].std()
    x, y = (x - mean) / deviation, (y - centre) / spread
    return Split(*(Data(x[rows], y[rows]) for rows in (first, second, third)))


# --- The two losses, and the closed form ---------------------------------------------------------

Hyper: TypeAlias = dict[str, Tensor]  # what is learned, by name: logarithms


def error(weights: Tensor, data: Data) -> Tensor:
    """Return the mean squared error: the outer loss, on the validation set."""
    return functional.mse_loss(data.x @ weights, data.y)


def inner_loss(weights: Tensor, hyper: Hyper, data: Data) -> Tensor:
    """Return half of that, with weight decay: one for all weights, or one for each."""
    decay = hyper["log decay"].exp()
    return error(weights, data) / 2 + (decay * weights.square()).sum() / 2


def ridge(hyper: Hyper, data: Data) -> Tensor:
    """Return the weights where the inner loss is least, by the normal equations."""
    count, features = data.x.shape
    decay = hyper["log decay"].exp().expand(features)
    curvature = data.x.T @ data.x / count + decay.diag()
    weights: Tensor = torch.linalg.solve(curvature, data.x.T @ data.y / count)
    return weights


# --- Two methods for the hypergradient -----------------------------------------------------------


def unrolled(hyper: Hyper, data: Data, steps: int) -> Tensor:
    """Return the weights after some steps from zero, differentiable through the steps."""
    run = gradkit.meta.unroll(
        inner_loss,
        torch.zeros_like(data.x[0]),
        [data] * steps,  # the full batch, every time
        gradkit.meta.sgd(lr=hyper["log rate"].exp()),
        outer=hyper,
        # Keep the weights before each step, not its graph: the backward pass recomputes it.
        memory="recompute",
    )
    weights: Tensor = run.params
    return weights


def at_minimum(data: Data, steps: int) -> Callable[[Tensor, Hyper], Tensor]:
    """Return a function from a start to the minimum, differentiable by implicit differentiation."""
    largest = torch.linalg.matrix_norm(data.x, 2).square() / len(data.x)

    def solver(start: Tensor, hyper: Hyper) -> Tensor:
        # The solver is not differentiated, so any will do. Momentum makes it converge faster.
        rate = 1 / (largest + hyper["log decay"].exp().max())
        opt = gradkit.meta.sgd(lr=rate, momentum=0.9)
        batches = [data] * steps
        run = gradkit.meta.unroll(inner_loss, start, batches, opt, outer=hyper, first_order=True)
        weights: Tensor = run.params
        return weights

    def loss(weights: Tensor, hyper: Hyper) -> Tensor:
        return inner_loss(weights, hyper, data)

    return gradkit.meta.implicit(solver, loss, maxiter=500, tol=RESIDUAL)


# --- Do they agree with the closed form? ---------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How far a hypergradient is from the true one, relatively, after so many inner steps."""

    steps: int
    unrolled: float
    implicit: float


def hyper_at(decay: float, rate: float, device: torch.device) -> Hyper:
    """Return hyper-parameters that require grad."""

    def leaf(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=device).log().requires_grad_()

    return {"log decay": leaf(decay), "log rate": leaf(rate)}


def decay_grad(weights: Tensor, hyper: Hyper, data: Split) -> Tensor:
    """Return the gradient of the validation loss with respect to the log of the weight decay."""
    _, grad = gradkit.value_and_grads(error(weights, data.validation), hyper["log decay"])
    assert grad is not None  # None would mean frozen
    return grad


def agreements(data: Split, several_steps: Sequence[int]) -> list[Agreement]:
    """Compare both methods with the closed form, for inner loops of several lengths."""
    hyper = hyper_at(0.3, 0.1, data.train.x.device)
    true = decay_grad(ridge(hyper, data.train), hyper, data)

    def difference(weights: Tensor) -> float:
        return ((decay_grad(weights, hyper, data) - true) / true).abs().item()

    start = torch.zeros_like(data.train.x[0])
    return [
        Agreement(
            steps,
            unrolled=difference(unrolled(hyper, data.train, steps)),
            implicit=difference(at_minimum(data.train, steps)(start, hyper)),
        )
        for steps in several_steps
    ]


def rate_difference(data: Split) -> float:
    """Return the relative error of the learning rate's gradient against central differences."""
    hyper = hyper_at(0.3, 0.1, data.train.x.device)

    def loss(hyper: Hyper) -> Tensor:
        return error(unrolled(hyper, data.train, STEPS), data.validation)

    _, grad = gradkit.value_and_grads(loss(hyper), hyper["log rate"])
    assert grad is not None
    width = 1e-5
    with torch.no_grad():
        beside = [loss({**hyper, "log rate": hyper["log rate"] + h}) for h in (width, -width)]
    expected = (beside[0] - beside[1]) / (2 * width)
    return ((grad - expected) / expected).abs().item()


# --- Learning them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """The hyper-parameters that a method has learned.

    Attributes:
        name: What it is called.
        decays: The weight decay over meta-steps; the geometric mean, if there are several.
        rate: The learning rate, if it matters.
        losses: The validation loss over meta-steps.
        test: The loss on the test set, in the end.
        trained: How many times the model was trained.
    """

    name: str
    decays: list[float]
    rate: float | None
    losses: list[float]
    test: float
    trained: int


def learn(
    name: str,
    hyper: Hyper,
    weights_at: Callable[[Hyper, Tensor], Tensor],
    data: Split,
    meta_steps: int,
    progress: Progress,
) -> Learned:
    """Minimize the validation loss over the hyper-parameters.

    `weights_at(hyper, before)` returns the trained weights; it may start from those before.
    """
    bar = progress.add_task(name, total=meta_steps, status="")
    # The meta-optimizer is a pure function, too.
    opt = gradkit.meta.adam(lr=META_LEARNING_RATE)
    state = opt.init(hyper)
    weights = torch.zeros_like(data.train.x[0])
    decays, losses = [], []
    for _ in range(meta_steps):
        weights = weights_at(hyper, weights.detach())
        loss, grads = gradkit.value_and_grads(error(weights, data.validation), hyper)
        decays.append(hyper["log decay"].mean().exp().item())
        losses.append(loss.item())
        with torch.no_grad():
            hyper, state = opt.step(hyper, grads, state)
        hyper = gradkit.tree.map(lambda leaf: leaf.requires_grad_(), hyper)
        status = f"loss {losses[-1]:.4f}  decay {decays[-1]:.3g}"
        progress.update(bar, advance=1, status=status)
    with torch.no_grad():
        weights = weights_at(hyper, weights)
        decays.append(hyper["log decay"].mean().exp().item())
        losses.append(error(weights, data.validation).item())
        rate = hyper["log rate"].exp().item() if "log rate" in hyper else None
        test = error(weights, data.test).item()
    return Learned(name, decays, rate, losses, test, meta_steps + 1)


def learn_all(data: Split, size: Size, console: Console) -> list[Learned]:
    """Learn by unrolling, and by implicit differentiation: one weight decay, and one for each."""
    device = data.train.x.device
    both = hyper_at(START_DECAY, START_RATE, device)
    one = {"log decay": both["log decay"]}
    each = one["log decay"].detach().expand(data.train.x.shape[1])
    many = {"log decay": each.clone().requires_grad_()}
    find = at_minimum(data.train, size.steps_to_minimum)
    methods: list[tuple[str, Hyper, Callable[[Hyper, Tensor], Tensor]]] = [
        ("unrolled", both, lambda hyper, _: unrolled(hyper, data.train, STEPS)),
        ("implicit", one, lambda hyper, before: find(before, hyper)),
        ("implicit, for each", many, lambda hyper, before: find(before, hyper)),
    ]
    with progress_on(console) as progress:
        return [
            learn(name, hyper, weights_at, data, size.meta_steps, progress)
            for name, hyper, weights_at in methods
        ]


# --- Searching them ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The results of a grid search: `losses` on the validation set, at `decays` and `rates`."""

    name: str
    decays: Tensor  # [D]
    rates: Tensor  # [R]; one, if it does not matter
    losses: Tensor  # [D, R]
    tests: Tensor  # [D, R], on the test set

    @property
    def best(self) -> tuple[int, int]:
        """Where the validation loss is least."""
        row, column = divmod(int(self.losses.nan_to_num(torch.inf).argmin()), len(self.rates))
        return row, column


@torch.no_grad()
def grids(data: Split, decays: int, rates: int) -> list[Grid]:
    """Try every weight decay: with every learning rate, and at the minimum."""
    device = data.train.x.device
    log_decays = torch.logspace(-4, 1, decays, dtype=torch.float64, device=device).log()
    log_rates = torch.logspace(-4, 0, rates, dtype=torch.float64, device=device).log()

    def after_steps(log_decay: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
        weights = unrolled({"log decay": log_decay, "log rate": log_rate}, data.train, STEPS)
        return error(weights, data.validation), error(weights, data.test)

    def minimum(log_decay: Tensor) -> tuple[Tensor, Tensor]:
        weights = ridge({"log decay": log_decay}, data.train)
        return error(weights, data.validation), error(weights, data.test)

    pairs = (log_decays.repeat_interleave(rates), log_rates.repeat(decays))
    losses, tests = (part.reshape(decays, rates) for part in vmap(after_steps)(*pairs))
    exact = [part[:, None] for part in vmap(minimum)(log_decays)]
    return [
        Grid("grid, unrolled", log_decays.exp(), log_rates.exp(), losses, tests),
        Grid("grid, at minimum", log_decays.exp(), log_rates[:1].exp(), *exact),
    ]


# --- The run, and its checks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """How long to learn, how finely to search, and the thresholds of the checks."""

    meta_steps: int
    steps_to_minimum: int  # from the last meta-step's minimum
    compared: tuple[int, ...]  # inner steps after which hypergradients are compared
    decays: int  # of the grid
    rates: int
    worse: float  # by how much the learned loss may exceed the grid's best, relatively


FULL = Size(80, 80, compared=(20, 100, 300, 1000), decays=41, rates=25, worse=2e-3)
SMOKE = Size(5, 50, compared=(20, 1000), decays=5, rates=4, worse=torch.inf)
TOLERANCE = 1e-7  # of a hypergradient after the longest inner loop, relatively
RATE_TOLERANCE = 1e-6  # against finite differences, which are less exact


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    agreements: list[Agreement]
    rate_difference: float
    learned: list[Learned]
    grids: list[Grid]


def experiment(size: Size, device: torch.device, console: Console) -> Outcome:
    """Compare hypergradients, learn with them, and search."""
    data = load(device)
    return Outcome(
        agreements(data, size.compared),
        rate_difference(data),
        learn_all(data, size, console),
        grids(data, size.decays, size.rates),
    )


def failed_checks(outcome: Outcome, size: Size) -> list[str]:
    """Return one message for each check that failed."""
    last = outcome.agreements[-1]
    differences = [
        (f"the unrolled hypergradient after {last.steps} steps", last.unrolled, TOLERANCE),
        (f"the implicit hypergradient after {last.steps} steps", last.implicit, TOLERANCE),
        ("the gradient by the learning rate", outcome.rate_difference, RATE_TOLERANCE),
    ]
    # Not `>`, which NaN would pass.
    failed = [
        f"{name} is off by {difference:.1e}, relatively, not by {most:g} at most"
        for name, difference, most in differences
        if not difference <= most
    ]
    for learned, grid in (
        (outcome.learned[0], outcome.grids[0]),
        (outcome.learned[1], outcome.grids[1]),
    ):
        least = grid.losses[grid.best].item()
        if not learned.losses[-1] <= least * (1 + size.worse):
            failed.append(
                f"{learned.name}: the validation loss is {learned.losses[-1]:.4f}, and the grid's "
                f"{least:.4f}"
            )
    failed += [
        f"{learned.name}: the validation loss did not become less"
        for learned in outcome.learned
        if not learned.losses[-1] < learned.losses[0]
    ]
    return failed


# --- Telling and drawing -------------------------------------------------------------------------


def agreement_table(outcome: Outcome) -> Table:
    """Return how far both hypergradients are from the true one."""
    table = Table(title="Hypergradient by weight decay:\nrelative difference from the closed form")
    for heading in ("inner steps", "unrolled", "implicit"):
        table.add_column(heading, justify="right")
    for one in outcome.agreements:
        table.add_row(str(one.steps), f"{one.unrolled:.1e}", f"{one.implicit:.1e}")
    table.caption = (
        f"the last row must be below {TOLERANCE:g}\nby the learning rate, from finite differences:"
        f"\n{outcome.rate_difference:.1e}, must be below {RATE_TOLERANCE:g}"
    )
    return table


def learned_table(outcome: Outcome) -> Table:
    """Return what was learned, and the best of each grid search."""
    table = Table(title="Mean squared error, the target's variance being 1")
    table.add_column("")
    for heading in ("weight\ndecay", "learning\nrate", "validation", "test", "models\ntrained"):
        table.add_column(heading, justify="right")
    for learned in outcome.learned:
        rate = "" if learned.rate is None else f"{learned.rate:.3g}"
        losses = f"{learned.losses[-1]:.4f}", f"{learned.test:.4f}"
        table.add_row(
            learned.name, f"{learned.decays[-1]:.3g}", rate, *losses, str(learned.trained)
        )
    table.add_section()
    for grid in outcome.grids:
        row, column = grid.best
        rate = f"{grid.rates[column].item():.3g}" if len(grid.rates) > 1 else ""
        losses = f"{grid.losses[grid.best].item():.4f}", f"{grid.tests[grid.best].item():.4f}"
        decay = f"{grid.decays[row].item():.3g}"
        table.add_row(grid.name, decay, rate, *losses, str(grid.losses.numel()))
    table.caption = f"unrolled: {STEPS} inner steps; of several weight decays the geometric mean"
    return table


COLORS = ("#0072b2", "#d55e00", "#009e73")


def draw(outcome: Outcome, path: Path) -> None:
    """Save a picture of the losses over meta-steps, and of the grid's curves."""
    figure = blank_figure(11, 4.5)
    left, right = figure.subplots(1, 2, sharey=True)
    for learned, color in zip(outcome.learned, COLORS, strict=True):
        left.plot(learned.losses, color=color, label=learned.name, linewidth=2)
    for grid, color in zip(outcome.grids, COLORS, strict=False):
        # Over weight decay, with the best learning rate for each.
        curve = grid.losses.nan_to_num(torch.inf).amin(1).cpu()
        left.axhline(curve.min().item(), color=color, linestyle=":", label=f"best of {grid.name}")
        right.plot(grid.decays.cpu(), curve, color=color, linestyle=":", label=grid.name)
    for learned, color in zip(outcome.learned[:2], COLORS, strict=False):
        right.plot(
            learned.decays, learned.losses, color=color, alpha=0.6, label=f"{learned.name}, path"
        )
        right.plot(learned.decays[-1], learned.losses[-1], "o", color=color)
    highest = 1.05 * max(learned.losses[0] for learned in outcome.learned[1:])
    lowest = 0.97 * min(min(learned.losses) for learned in outcome.learned)
    left.set(xlabel="meta-steps", ylabel="validation loss", ylim=(lowest, highest))
    right.set(xscale="log", xlabel="weight decay")
    tidy(left, "Learned")
    tidy(right, "Grid search, and the path of the learned values")
    save(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    size = SMOKE if options.smoke else FULL
    console = Console()
    outcome = experiment(size, options.device, console)
    picture = options.output / "learn_hyperparams.png"
    draw(outcome, picture)

    console.print(agreement_table(outcome), learned_table(outcome), sep="\n")
    failed = failed_checks(outcome, size)
    summary = "the hypergradients are correct, and lead to the minimum of the grid"
    return conclude(console, picture, failed, summary)


if __name__ == "__main__":
    # With matrices this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
