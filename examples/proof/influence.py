"""Influence functions: what leaving out one training image would do, without training again.

A linear classifier of digits is at the minimum of its loss. Leaving out image i moves the minimum
by about H^-1 g_i / n, with the Hessian H of the training loss and the gradient g_i of the image's
loss. So the loss of a test image changes by about (H^-1 g_test) . g_i / n: one linear system for
each test image, solved by conjugate gradients, whose products with H are `gradkit.func.hvp`.

As in the source: a test image that is classified wrongly, the training images of the largest
influence, and each of them really left out. Here it is scikit-learn that trains anew.

    python examples/proof/influence.py [--seeds 3] [--plot influence.png]

Source: Koh and Liang 2017, "Understanding Black-box Predictions via Influence Functions", figure 2
(left), https://arxiv.org/abs/1703.04730
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _proof import conclude, digits, over_seeds, parse, save_plot, table, use_one_thread
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradkit

TRAIN = 1000  # images; the others are for testing
DECAY = 0.01  # of the weights, not of the biases
LEFT_OUT = 40  # images, one at a time
GROUPS = (10, 50, 200)  # the images of the largest influence on one side, left out together

Weights = dict[str, Tensor]
Images = tuple[Tensor, Tensor]  # and their digits


def logits(weights: Weights, images: Tensor) -> Tensor:
    """Return the scores of ten digits for each image."""
    return images @ weights["weight"].T + weights["bias"]


def training_loss(weights: Weights, data: Images) -> Tensor:
    """Return the mean loss of the training images, and the penalty."""
    penalty = DECAY / 2 * weights["weight"].square().sum()
    return cross_entropy(logits(weights, data[0]), data[1]) + penalty


def train(data: Images, of: int = TRAIN) -> Weights:
    """Return the minimum, by scikit-learn; `of` is the number by which the losses are divided."""
    # It multiplies the sum of the losses by C, so that leaving one out keeps its penalty.
    model = LogisticRegression(C=1 / (of * DECAY), solver="newton-cholesky", tol=1e-10)
    model.fit(*(part.numpy() for part in data))
    return {
        "weight": torch.from_numpy(model.coef_), "bias": torch.from_numpy(model.intercept_)
    }  # fmt: skip


def influences(weights: Weights, train: Images, test: Images) -> Tensor:
    """Return by how much the loss of the test image would grow without each training image."""

    def product(direction: Weights) -> Weights:
        hv: Weights
        _, hv = gradkit.func.hvp(lambda w: training_loss(w, train), weights, direction)
        return hv

    def loss(weights: Weights, image: Tensor, digit: Tensor) -> Tensor:
        return cross_entropy(logits(weights, image), digit)

    _, slope = gradkit.func.value_and_grads(loss)(weights, *test)
    # A constant added to all biases changes no loss: there H is zero, and so are all gradients.
    direction, info = gradkit.tree.cg(product, slope, tol=1e-8, maxiter=1000)
    assert info.residual < 1e-8
    # All dot products with the gradients of samples at once: the derivative along the direction.
    along: Tensor
    _, along = gradkit.func.jvp(
        lambda w: cross_entropy(logits(w, train[0]), train[1], reduction="none"),
        (weights,),
        (direction,),
    )
    return along / len(train[1])


@dataclass(frozen=True)
class Outcome:
    """Changes of the loss of a test image, as predicted, and by training again."""

    predicted: Tensor  # [LEFT_OUT]
    retrained: Tensor
    groups: dict[int, float]  # by size: the change, as a multiple of the predicted one

    @property
    def correlation(self) -> float:
        """Pearson's R, as in the source."""
        return float(torch.corrcoef(torch.stack([self.predicted, self.retrained]))[0, 1])

    @property
    def slope(self) -> float:
        """Of the line through zero that fits the points best."""
        return float(self.predicted @ self.retrained / self.predicted.square().sum())


def measure(seed: int, left_out: int = LEFT_OUT, groups: Sequence[int] = GROUPS) -> Outcome:
    """Return predicted and true changes for one wrongly classified test image."""
    images, labels = digits(seed)
    data = images[:TRAIN], labels[:TRAIN]
    weights = train(data)
    wrong = logits(weights, images[TRAIN:]).argmax(1) != labels[TRAIN:]
    chosen = TRAIN + int(wrong.nonzero()[0])
    test = images[chosen : chosen + 1], labels[chosen : chosen + 1]
    influence = influences(weights, data, test)

    def change(dropped: Tensor) -> float:
        kept = torch.ones(TRAIN, dtype=torch.bool).index_fill(0, dropped, False)
        again = train((data[0][kept], data[1][kept]))
        return float(cross_entropy(logits(again, test[0]), test[1]) - before)

    before = cross_entropy(logits(weights, test[0]), test[1])
    most = influence.abs().argsort(descending=True)[:left_out]
    retrained = torch.tensor([change(one) for one in most[:, None]], dtype=torch.double)
    helpful = influence.argsort(descending=True)
    ratios = {
        size: change(helpful[:size]) / float(influence[helpful[:size]].sum()) for size in groups
    }
    return Outcome(influence[most], retrained, ratios)


def draw(outcome: Outcome, axes: Any) -> None:
    """Draw the changes of one seed against each other, and where they are equal."""
    ends = [outcome.predicted.min().item(), outcome.predicted.max().item()]
    axes.plot(ends, ends, color="gray", linestyle=":", label="equal")
    axes.plot(outcome.predicted, outcome.retrained, "o", color="#0072b2", alpha=0.7)
    axes.set(xlabel="change of the test loss, predicted", ylabel="trained again without the image")
    axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    outcomes = [measure(seed) for seed in range(options.seeds)]
    correlations = [outcome.correlation for outcome in outcomes]
    slopes = [outcome.slope for outcome in outcomes]
    rows = [
        ["one, R", over_seeds(correlations, ".4f"), "on the diagonal"],
        ["one, slope", over_seeds(slopes), "on the diagonal"],
    ]
    for size in GROUPS:
        ratios = [outcome.groups[size] for outcome in outcomes]
        rows.append([f"the {size} most helpful, slope", over_seeds(ratios), ""])
    print(table([f"left out of {TRAIN} images", "here", "figure 2"], rows))
    print("\nThe slope is the true change over the predicted one.")
    print(
        "Fails: for many images that pull the same way. And the theory is of a minimum, where the"
    )
    print("training of networks does not end: see training_attribution.py.")
    save_plot(options.plot, partial(draw, outcomes[0]))
    claims = {
        "R is above 0.99": min(correlations) > 0.99,
        "the slope is between 0.9 and 1.3": all(0.9 < slope < 1.3 for slope in slopes),
    }
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
