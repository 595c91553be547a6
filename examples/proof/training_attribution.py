"""Attribution through training: what a training run would have come to without some images.

A network after 120 steps of training is at no minimum, which influence functions assume. But its
training is a function of the weights of the training images, whose derivative is exact:
`gradkit.meta.unroll` over all steps, then one backward pass for each test image. The change of a
test loss without some images is predicted as minus the sum of their derivatives.

The linear datamodeling score compares such predictions with training again without a random 1, 5 or
20 % of the images: the rank correlation of predicted and true losses, averaged over test images.
Beside it: influence functions with the Gauss-Newton matrix, by `gradkit.func.ggn_vp` and conjugate
gradients, and the products of the gradients of training and test images. All trainings have the
same start and the same batches, as in the source.

    python examples/proof/training_attribution.py [--seeds 3] [--plot attribution.png]

Source: Ilyas and Engstrom 2025, "MAGIC: Near-Optimal Data Attribution for Deep Learning",
https://arxiv.org/abs/2504.16430; the score is of Park et al. 2023, "TRAK: Attributing Model
Behavior at Scale", https://arxiv.org/abs/2303.14186
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _proof import conclude, digits, over_seeds, parse, save_plot, table, use_one_thread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import gradkit

TRAIN, TESTS = 500, 10  # images
BATCH = 50
DROPPED = (0.01, 0.05, 0.2)  # of the training images
SUBSETS = 40  # trainings for each of these
DAMPING = 0.01  # of the Gauss-Newton matrix

Params = dict[str, Tensor]
Images = tuple[Tensor, Tensor]  # and their digits


@dataclass(frozen=True)
class Setting:
    """How to train."""

    name: str
    opt: gradkit.meta.Optimizer
    steps: int


SGD = gradkit.meta.sgd(lr=0.1, momentum=0.9)
SETTINGS = (
    Setting("SGD, 120 steps", SGD, 120),
    Setting("SGD, 300 steps", SGD, 300),
    Setting("Adam, 300 steps", gradkit.meta.adam(lr=0.01), 300),
)


def scores(params: Params, images: Tensor) -> Tensor:
    """Return the scores of ten digits for each image, by a network with one hidden layer."""
    hidden = linear(images, params["0.weight"], params["0.bias"]).tanh()
    return linear(hidden, params["2.weight"], params["2.bias"])


def losses(params: Params, data: Images) -> Tensor:
    """Return the loss of each image."""
    return cross_entropy(scores(params, data[0]), data[1], reduction="none")


def initial(seed: int) -> Params:
    """Return the initial parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    return {name: p.detach() for name, p in fresh.named_parameters()}


def batches(seed: int, steps: int) -> list[Tensor]:
    """Return the images of each step: epochs in a random order."""
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-steps * BATCH // TRAIN)
    orders = [torch.randperm(TRAIN, generator=generator) for _ in range(epochs)]
    order = torch.cat(orders)
    return [order[i * BATCH : (i + 1) * BATCH] for i in range(steps)]


@dataclass(frozen=True)
class Run:
    """What all trainings of a seed share."""

    opt: gradkit.meta.Optimizer
    start: Params
    batches: list[Tensor]
    data: Images
    tests: Images

    def train(self, weights: Tensor) -> Params:
        """Return the parameters at the end, where each training image has a weight."""

        def loss(params: Params, weights: Tensor, batch: Tensor) -> Tensor:
            images, labels = self.data
            return (weights[batch] * losses(params, (images[batch], labels[batch]))).sum() / BATCH

        args = loss, self.start, self.batches, self.opt
        trained: Params = gradkit.meta.unroll(*args, outer=weights).params
        return trained

    def test_losses(self, kept: Tensor) -> Tensor:
        """Return the losses of the test images, [subsets, TESTS], of trainings in one batch."""
        with torch.no_grad():
            trained = torch.func.vmap(lambda weights: losses(self.train(weights), self.tests))
            result: Tensor = trained(kept)
        return result


# --- Three predictions: the derivative of each test loss by each training image's weight ---------


def by_training(run: Run) -> tuple[Any, Params]:
    """Return the derivatives through all steps, [TESTS, TRAIN], and the parameters at the end."""
    weights = torch.ones(TRAIN, dtype=torch.double, requires_grad=True)
    trained = run.train(weights)
    derivatives = gradkit.per_loss_grads(losses(trained, run.tests), weights, unused="zeros")
    return derivatives, {name: p.detach() for name, p in trained.items()}


def by_influence(run: Run, params: Params) -> Tensor:
    """Return what influence functions take for them, with the damped Gauss-Newton matrix."""

    def product(direction: Params) -> Params:
        def loss(out: Tensor) -> Tensor:
            return cross_entropy(out, run.data[1])

        result: Params
        _, result = gradkit.func.ggn_vp(
            lambda params: scores(params, run.data[0]), loss, params, direction
        )
        return result

    slopes = gradkit.func.per_loss_grads(losses)(params, run.tests)
    rows = []
    for slope in gradkit.tree.unstack(slopes):
        solution, _ = gradkit.tree.cg(product, slope, damping=DAMPING, tol=1e-4)
        _, along = gradkit.func.jvp(lambda p: losses(p, run.data), (params,), (solution,))
        rows.append(-along / TRAIN)
    return torch.stack(rows)


def by_products(run: Run, params: Params) -> Tensor:
    """Return the negative products of the gradients of test and training images."""
    matrices = [
        gradkit.tree.to_matrix(
            gradkit.tree.unstack(gradkit.func.per_loss_grads(losses)(params, d))
        )[0]
        for d in (run.tests, run.data)
    ]
    return -(matrices[0] @ matrices[1].T)


# --- Their score ---------------------------------------------------------------------------------


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation of two vectors."""
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    return torch.corrcoef(ranks)[0, 1].item()


@dataclass(frozen=True)
class Outcome:
    """The test accuracy, and the score of each method for each share that was dropped."""

    accuracy: float
    scores: dict[str, dict[float, float]]
    example: tuple[Tensor, Tensor]  # changes of a test loss, predicted through training, and true


def measure(setting: Setting, seed: int, subsets: int = SUBSETS) -> Outcome:
    """Return the scores of the three methods for one network."""
    images, labels = digits(seed)
    end = TRAIN + TESTS
    data, tests = ((images[part], labels[part]) for part in (slice(TRAIN), slice(TRAIN, end)))
    run = Run(setting.opt, initial(seed), batches(seed, setting.steps), data, tests)
    derivatives, params = by_training(run)
    methods = {
        "unroll": derivatives,
        "influence": by_influence(run, params),
        "products": by_products(run, params),
    }
    before = losses(params, run.tests)
    generator = torch.Generator().manual_seed(seed)
    outcome: dict[str, dict[float, float]] = {name: {} for name in methods}
    examples = {}
    for share in DROPPED:
        orders = [torch.randperm(TRAIN, generator=generator) for _ in range(subsets)]
        kept = (torch.stack(orders) >= round(share * TRAIN)).double()
        true = (run.test_losses(kept) - before).T
        for name, derivative in methods.items():
            predicted = derivative @ (kept - 1).T
            pairs = zip(predicted, true, strict=True)
            outcome[name][share] = sum(rank_correlation(*pair) for pair in pairs) / TESTS
        examples[share] = (derivatives @ (kept - 1).T)[0], true[0]
    correct = scores(params, images[end:]).argmax(1) == labels[end:]
    return Outcome(correct.double().mean().item(), outcome, examples[DROPPED[1]])


def draw(outcomes: dict[str, list[Outcome]], axes: Any) -> None:
    """Draw the scores over the share that is dropped: all seeds of the first and last setting."""
    settings = [SETTINGS[0].name, SETTINGS[-1].name]
    for name, color in zip(("unroll", "influence", "products"), ("C0", "C1", "C7"), strict=True):
        for setting, style in zip(settings, ("-o", ":s"), strict=True):
            means = [
                sum(outcome.scores[name][share] for outcome in outcomes[setting])
                / len(outcomes[setting])
                for share in DROPPED
            ]
            axes.plot(means, style, color=color, label=f"{name}, {setting}")
    axes.set_xticks(range(len(DROPPED)), [f"{share:.0%}" for share in DROPPED])
    axes.set(xlabel="dropped", ylabel="linear datamodeling score", ylim=(0, 1.3))
    axes.legend(frameon=False, fontsize="small", ncols=2, loc="upper center")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    outcomes = {
        setting.name: [measure(setting, seed) for seed in range(options.seeds)]
        for setting in SETTINGS
    }
    rows = []
    for setting, each in outcomes.items():
        accuracy = over_seeds([100 * outcome.accuracy for outcome in each], ".1f")
        rows.append([f"{setting} ({accuracy} % right)", "", "", ""])
        for name in ("unroll", "influence", "products"):
            cells = [over_seeds([o.scores[name][share] for o in each], ".2f") for share in DROPPED]
            rows.append([f"  {name}", *cells])
    print(table(["", *(f"{share:.0%} dropped" for share in DROPPED)], rows))
    print("\nIn the source the score is close to 1 where few images are dropped.")
    print("Fails: the longer the training, above all with Adam; and at 20 %, where influence is as")
    print("good, as the effect of so many images is no longer the sum of theirs.")
    save_plot(options.plot, partial(draw, outcomes))
    first = outcomes[SETTINGS[0].name]
    claims = {
        "through 120 steps, the score is above 0.85 for 1 and 5 %": all(
            o.scores["unroll"][share] > 0.85 for o in first for share in DROPPED[:2]
        ),
        "and above that of influence functions": all(
            o.scores["unroll"][share] > o.scores["influence"][share]
            for o in first
            for share in DROPPED[:2]
        ),
    }
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
