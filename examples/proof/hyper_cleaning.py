"""Data hyper-cleaning: a weight for each training image, learned by gradient descent.

Half of the training labels are drawn anew. The loss of each training image gets a weight, the
sigmoid of a number, and 700 numbers are learned: a classifier that is trained with these weights
should be good on a validation set whose labels are right. Its loss is differentiated with respect
to the numbers in two ways: at the minimum, by `gradkit.meta.implicit`, and through 60 steps of
training, by `gradkit.meta.unroll`. Then, as in the source, images with a weight below one half are
left out, and the classifier is trained on the others together with the validation set.

    python examples/proof/hyper_cleaning.py [--seeds 3] [--plot hyper_cleaning.png]

Source: Franceschi et al. 2017, "Forward and Reverse Gradient-Based Hyperparameter Optimization",
section 5.1 and table 1, https://arxiv.org/abs/1703.01785
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _proof import conclude, digits, over_seeds, parse, save_plot, table, use_one_thread
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradkit

TRAIN, VALIDATION = 700, 150  # images; the other 947 are for testing
FEW = 20  # of the validation images, for comparison
META_STEPS = 40  # of Adam
STEPS = 60  # of training, which are unrolled
DECAY = 0.002

Weights = dict[str, Tensor]
Images = tuple[Tensor, Tensor]  # and their digits


def scores(weights: Weights, images: Tensor) -> Tensor:
    """Return the scores of ten digits for each image."""
    return images @ weights["weight"].T + weights["bias"]


def losses(weights: Weights, data: Images) -> Tensor:
    """Return the loss of each image."""
    return cross_entropy(scores(weights, data[0]), data[1], reduction="none")


def weighted_loss(weights: Weights, numbers: Tensor, data: Images) -> Tensor:
    """Return the mean of the losses, weighted, and a penalty, which makes the minimum unique."""
    penalty = DECAY / 2 * gradkit.tree.dot(weights, weights)
    return (numbers.sigmoid() * losses(weights, data)).mean() + penalty


def zeros() -> Weights:
    """Return where every training starts."""
    return {
        "weight": torch.zeros(10, 64, dtype=torch.double),
        "bias": torch.zeros(10, dtype=torch.double),
    }


def minimum(loss: Callable[[Weights], Tensor], start: Weights) -> Weights:
    """Return the minimum of a convex loss, by L-BFGS."""
    weights = {name: w.detach().clone().requires_grad_() for name, w in start.items()}
    optimizer = torch.optim.LBFGS(
        weights.values(), max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        value = loss(weights)
        gradkit.dotgrad.clear_grads_(weights)
        gradkit.backward_(value)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return {name: w.detach() for name, w in weights.items()}


def implicit_training(data: Images) -> Callable[[Tensor], Weights]:
    """Return what trains to the minimum, which is differentiated there."""
    latest = zeros()  # where the next one starts: the result does not depend on it

    def solver(start: Weights, numbers: Tensor) -> Weights:
        latest.update(minimum(lambda w: weighted_loss(w, numbers, data), latest))
        return latest

    find = gradkit.meta.implicit(solver, lambda w, numbers: weighted_loss(w, numbers, data))
    return lambda numbers: find(zeros(), numbers)


def unrolled_training(data: Images) -> Callable[[Tensor], Weights]:
    """Return what trains by steps of gradient descent, which are differentiated."""
    opt = gradkit.meta.sgd(lr=1.0, momentum=0.9)

    def train(numbers: Tensor) -> Weights:
        adapted = gradkit.meta.unroll(weighted_loss, zeros(), [data] * STEPS, opt, outer=numbers)
        weights: Weights = adapted.params
        return weights

    return train


WAYS = {"implicit": implicit_training, "unrolled": unrolled_training}


def cleaned(train: Callable[[Tensor], Weights], validation: Images, steps: int) -> Tensor:
    """Return the numbers, one for each training image, that are best for the validation loss."""
    numbers = torch.zeros(TRAIN, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([numbers], lr=0.2)
    for _ in range(steps):
        gradkit.minimize_(optimizer, losses(train(numbers), validation).mean())
    return numbers.detach()


@dataclass(frozen=True)
class Score:
    """How good a classifier is, and what was left out."""

    accuracy: float
    f1: float = float("nan")  # of the redrawn labels, as detected


def measure(
    seed: int, validation: int = VALIDATION, meta_steps: int = META_STEPS
) -> dict[str, Score]:
    """Return the scores of four trainings."""
    images, labels = digits(seed)
    generator = torch.Generator().manual_seed(seed)
    redrawn = torch.randperm(TRAIN, generator=generator) < TRAIN // 2
    given = torch.where(redrawn, torch.randint(10, (TRAIN,), generator=generator), labels[:TRAIN])
    wrong = given != labels[:TRAIN]
    trusted = images[TRAIN : TRAIN + validation], labels[TRAIN : TRAIN + validation]
    test = images[TRAIN + VALIDATION :], labels[TRAIN + VALIDATION :]

    def accuracy(kept: Tensor) -> float:
        data = torch.cat([images[:TRAIN][kept], trusted[0]]), torch.cat([given[kept], trusted[1]])
        ones = torch.full((len(data[1]),), torch.inf, dtype=torch.double)  # their sigmoid is 1
        weights = minimum(lambda weights: weighted_loss(weights, ones, data), zeros())
        return (scores(weights, test[0]).argmax(1) == test[1]).double().mean().item()

    outcome = {
        "all": Score(accuracy(torch.ones_like(wrong))), "oracle": Score(accuracy(~wrong))
    }  # fmt: skip
    for name, way in WAYS.items():
        training = way((images[:TRAIN], given))
        left_out = cleaned(training, trusted, meta_steps).sigmoid() < 0.5
        f1 = 2 * (left_out & wrong).sum() / (left_out.sum() + wrong.sum())
        outcome[name] = Score(accuracy(~left_out), f1.item())
    return outcome


TEXT = {
    "all": "all labels", "oracle": "the right labels", "implicit": "weights by implicit",
    "unrolled": "weights by unroll",
}  # fmt: skip


def draw(outcomes: Sequence[dict[str, Score]], axes: Any) -> None:
    """Draw the accuracies of each seed."""
    for name, text in TEXT.items():
        axes.plot([100 * outcome[name].accuracy for outcome in outcomes], "o-", label=text)
    axes.set(xlabel="seed", ylabel="test accuracy, %", xticks=range(len(outcomes)))
    axes.margins(y=0.3)
    axes.legend(frameon=False, loc="upper center", ncols=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    outcomes = [measure(seed) for seed in range(options.seeds)]
    too_few = [measure(seed, FEW) for seed in range(options.seeds)]
    rows = []
    for name, text in TEXT.items():
        f1 = [outcome[name].f1 for outcome in outcomes]
        rows.append([
            text,
            over_seeds([100 * outcome[name].accuracy for outcome in outcomes], ".1f"),
            "" if name in {"all", "oracle"} else over_seeds(f1, ".2f"),
            over_seeds([100 * outcome[name].accuracy for outcome in too_few], ".1f"),
        ])
    headings = ["trained with", "accuracy, %", "F1", f"{FEW} validation images, %"]
    print(table(headings, rows))
    print(f"\nFails: with {FEW} validation images, which {TRAIN} weights are free to fit: cleaning")
    print("leaves out what is right, and is worse than training on all labels.")
    save_plot(options.plot, partial(draw, outcomes))
    gains = [
        outcome[name].accuracy - outcome["all"].accuracy for outcome in outcomes for name in WAYS
    ]
    claims = {
        "cleaning adds accuracy": min(gains) > 0,
        "F1 is above 0.8": min(outcome[name].f1 for outcome in outcomes for name in WAYS) > 0.8,
    }
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
