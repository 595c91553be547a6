"""The honest null: two digits in one image, and whether gradient surgery beats the sum of losses.

Two handwritten digits overlap in one image, as in MultiMNIST, and a network with a shared trunk and
two heads says which they are. Methods for several losses change how the two gradients at the trunk
become one: PCGrad removes conflicts pair by pair, MGDA takes the shortest convex combination,
UPGrad projects each gradient onto the directions that make no loss worse. Each is a few lines for
`gradkit.combine`, and `gradkit.report.conflicts` measures what they could mend.

    python examples/proof/losses_surgery.py [--seeds 3] [--plot surgery.png]

Source: Kurin et al. 2022, "In Defense of the Unitary Scalarization for Deep Multi-Task Learning",
section 4.1, https://arxiv.org/abs/2201.04122. The methods: Yu et al. 2020, algorithm 1,
https://arxiv.org/abs/2001.06782; Sener and Koltun 2018, https://arxiv.org/abs/1810.04650; Quinton
and Rey 2024, https://arxiv.org/abs/2406.16232.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from _proof import conclude, digits, over_seeds, parse, save_plot, table, use_one_thread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradkit

TRAIN, TEST = 4000, 2000  # images of two digits, made of 1,297 and 500 digits
STEPS, BATCH = 500, 64
SHIFT = 4  # pixels, down and right, of the second digit

Aggregator: TypeAlias = Callable[[Tensor], Tensor]  # from [losses, n] to [n]


# --- From the gradients of two losses to one gradient --------------------------------------------


def total(matrix: Tensor) -> Tensor:
    """Return the sum of the gradients, which is the gradient of the sum of the losses."""
    return matrix.sum(0)


def pcgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the gradients, each without its conflict with the other."""
    a, b = matrix
    conflict = (a @ b).clamp_max(0)
    return torch.add(a - conflict / (b @ b) * b, b - conflict / (a @ a) * a)


def mgda(matrix: Tensor) -> Tensor:
    """Return twice the shortest vector between the gradients; twice, to be as long as a sum."""
    a, b = matrix
    share = ((b - a) @ b / (a - b).square().sum().clamp_min(1e-30)).clamp(0, 1)
    return torch.lerp(b, a, share).mul(2)


def upgrad(matrix: Tensor) -> Tensor:
    """Return the sum of the gradients, each projected onto the cone in which no loss grows."""
    gramian = matrix @ matrix.T
    weights = torch.eye(2, dtype=matrix.dtype, device=matrix.device)
    # The projection of row i adds w_i >= 0 of the other rows, of the least norm: the other w is 0.
    for row, other in ((0, 1), (1, 0)):
        weights[row, other] = (-gramian[row, other] / gramian[other, other]).clamp_min(0)
    return weights.sum(0) @ matrix


METHODS: dict[str, Aggregator] = {
    "sum of losses": total, "PCGrad": pcgrad, "MGDA": mgda, "UPGrad": upgrad
}  # fmt: skip


# --- Data, network, training ---------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Images [N, 1, 12, 12] of two digits, and both digits [2, N]."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor) -> Pairs:
        return Pairs(self.images[chosen], self.labels[:, chosen])


def overlaid(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> Pairs:
    """Return random pairs of digits, where the brighter pixel is seen."""
    first, second = torch.randint(len(labels), (2, count), generator=generator)
    canvas = torch.zeros(2, count, 8 + SHIFT, 8 + SHIFT)
    canvas[0, :, :8, :8] = images[first].reshape(-1, 8, 8)
    canvas[1, :, SHIFT:, SHIFT:] = images[second].reshape(-1, 8, 8)
    return Pairs(canvas.amax(0)[:, None], torch.stack([labels[first], labels[second]]))


def load(seed: int) -> tuple[Pairs, Pairs]:
    """Return pairs for training and for testing, which share no digit's image."""
    images, labels = digits(seed)
    generator = torch.Generator().manual_seed(seed)
    train = overlaid(images[:1297], labels[:1297], TRAIN, generator)
    return train, overlaid(images[1297:], labels[1297:], TEST, generator)


def network(seed: int) -> nn.ModuleDict:
    """Return the trunk and the heads; the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        )  # fmt: skip
        return nn.ModuleDict({
            "trunk": trunk,
            "first": nn.Linear(64, 10),
            "second": nn.Linear(64, 10),
        })


def losses_of(model: nn.ModuleDict, batch: Pairs) -> dict[str, Tensor]:
    """Return the loss of each head."""
    features = model["trunk"](batch.images)
    return {
        name: cross_entropy(model[name](features), labels)
        for name, labels in zip(("first", "second"), batch.labels, strict=True)
    }


@dataclass(frozen=True)
class Outcome:
    """The test accuracy, in percent, averaged over both heads, and the cosine of each step."""

    accuracy: float
    cosines: list[float]


def train(seed: int, aggregator: Aggregator, data: tuple[Pairs, Pairs], steps: int) -> Outcome:
    """Train a network: heads by their own loss, the trunk by what the aggregator makes of both."""
    model, (pairs, test) = network(seed), data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    cosines = []
    for _ in range(steps):
        batch = pairs[torch.randint(len(pairs.images), (BATCH,), generator=generator)]
        per_loss = gradkit.per_loss_grads(losses_of(model, batch), model)
        trunk = {
            loss: {name: grad for name, grad in grads.items() if name.startswith("trunk")}
            for loss, grads in per_loss.items()
        }
        cosines.append(gradkit.report.conflicts(trunk).cosine("first", "second"))
        grads = gradkit.combine(per_loss, total) | gradkit.combine(trunk, aggregator)
        gradkit.step_(optimizer, model, grads)
    with torch.no_grad():
        features = model["trunk"](test.images)
        scores = torch.stack([model[name](features) for name in ("first", "second")])
    return Outcome(100 * (scores.argmax(2) == test.labels).double().mean().item(), cosines)


def measure(seed: int, steps: int = STEPS) -> dict[str, Outcome]:
    """Return the outcome of each method, from the same weights and on the same batches."""
    data = load(seed)
    return {name: train(seed, aggregator, data, steps) for name, aggregator in METHODS.items()}


def average(cosines: Sequence[float]) -> list[float]:
    """Return the moving average over 20 steps."""
    return [sum(cosines[i : i + 20]) / 20 for i in range(len(cosines) - 19)]


def draw(outcomes: Sequence[dict[str, Outcome]], axes: Any) -> None:
    """Draw the cosines during training by the sum of the losses, of each seed."""
    for seed, outcome in enumerate(outcomes):
        axes.plot(average(outcome["sum of losses"].cosines), label=f"seed {seed}")
    axes.axhline(0, color="gray", linewidth=1)
    axes.set(xlabel="step", ylabel="cosine of the two gradients, mean of 20 steps", ylim=(-1, 1))
    axes.legend(frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit status: 0 if the claims hold."""
    options = parse(__doc__, argv)
    outcomes = [measure(seed) for seed in range(options.seeds)]
    rows, gains = [], []
    for name in METHODS:
        each = [outcome[name] for outcome in outcomes]
        gain = [o[name].accuracy - o["sum of losses"].accuracy for o in outcomes]
        conflicts = [100 * sum(c < 0 for c in o.cosines) / len(o.cosines) for o in each]
        clear = [100 * sum(c < -0.1 for c in o.cosines) / len(o.cosines) for o in each]
        rows.append([
            name,
            over_seeds([outcome.accuracy for outcome in each], ".2f"),
            "" if name == "sum of losses" else over_seeds(gain, "+.2f").replace("± +", "± "),
            over_seeds(conflicts, ".0f"),
            over_seeds(clear, ".0f"),
        ])
        gains += gain
    headings = ["", "accuracy, %", "over the sum", "cosine < 0, % of steps", "< -0.1"]
    print(table(headings, rows))
    print("\nIn the source, too, no method is consistently better than the sum of the losses. Why:")
    print(
        "the gradients are nearly orthogonal, so there is little to mend. (For two losses UPGrad is"
    )
    print("PCGrad.) Fails: it says nothing of losses that do conflict, or of other networks.")
    save_plot(options.plot, partial(draw, outcomes))
    claims = {
        "no method is more than 1.5 points from the sum": max(map(abs, gains)) < 1.5,
        "all learn": min(o.accuracy for each in outcomes for o in each.values()) > 85,
    }
    return conclude(claims)


if __name__ == "__main__":
    use_one_thread()
    sys.exit(main())
