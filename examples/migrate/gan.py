"""A Wasserstein GAN with gradient penalty on images of digits: two players, two optimizers.

    python examples/migrate/gan.py [--smoke] [--device cuda]

`legacy` and `functional` are the same loop. Both players step from the same weights (Gulrajani et
al. 2017, https://arxiv.org/abs/1704.00028, with one critic step for each of the generator).
The weights must be equal bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from side_by_side import parse, verdict
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Adam

import gradkit

NOISE = 16
PENALTY = 10.0

Loop: TypeAlias = Callable[[nn.Module, nn.Module, Sequence[Tensor]], float]


def adam(player: nn.Module) -> Adam:
    """Return the optimizer of one player."""
    return Adam(player.parameters(), lr=1e-3, betas=(0.5, 0.9))


def legacy(generator: nn.Module, critic: nn.Module, batches: Sequence[Tensor]) -> float:
    """Train through `.grad`; return the last estimate of the distance between real and fake."""
    optimizer_g, optimizer_d = adam(generator), adam(critic)
    for real in batches:
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        loss_g = -critic(fake).mean()
        optimizer_g.zero_grad()
        loss_g.backward()

        optimizer_d.zero_grad()  # after loss_g.backward(), which left gradients in the critic too
        fake = fake.detach()
        # A weight's gradient is a sum over the critic's passes, and rounding depends on the order
        # of a sum. The order is that of the passes; so it is fake, real, mixed in both loops.
        on_fake, on_real = critic(fake), critic(real)
        share = torch.rand(len(real), 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss_d = on_fake.mean() - on_real.mean() + PENALTY * penalty
        loss_d.backward()

        optimizer_g.step()
        optimizer_d.step()
    distance: Tensor = on_real.mean() - on_fake.mean()
    return distance.item()


def functional(generator: nn.Module, critic: nn.Module, batches: Sequence[Tensor]) -> float:
    """Train with gradients as values; return the last estimate of the distance."""
    optimizer_g, optimizer_d = adam(generator), adam(critic)
    for real in batches:
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        on_fake, on_real = critic(fake), critic(real)
        share = torch.rand(len(real), 1, device=real.device)
        mixed = share * real + (1 - share) * fake
        _, slope = gradkit.value_and_grads(critic(mixed).sum(), [mixed], create_graph=True)
        penalty = (slope[0].norm(dim=1) - 1).square().mean()
        losses = {"G": -on_fake.mean(), "D": on_fake.mean() - on_real.mean() + PENALTY * penalty}
        grads = gradkit.simultaneous_grads(losses, {"G": generator, "D": critic})

        gradkit.step_(optimizer_g, generator, grads["G"])
        gradkit.step_(optimizer_d, critic, grads["D"])
    distance: Tensor = on_real.mean() - on_fake.mean()
    return distance.item()


def load(device: torch.device, epochs: int, size: int = 64) -> list[Tensor]:
    """Return the images, [B, 64] with values from -1 to 1, in the full batches of all epochs."""
    pixels, _ = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32, device=device) / 8 - 1
    random = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(images), generator=random) for _ in range(epochs)]
    return [
        images[part.to(device)]
        for order in orders
        for part in torch.split(order, size)
        if len(part) == size
    ]


def train(loop: Loop, batches: Sequence[Tensor], device: torch.device) -> tuple[nn.Module, float]:
    """Return both players trained by this loop, and the last estimate of the distance."""
    torch.manual_seed(0)  # both loops start from the same weights, and draw the same noise
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64),
        nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 1),
    )  # fmt: skip
    players = nn.ModuleDict({"generator": generator, "critic": critic}).to(device)
    return players, loop(generator, critic, batches)


def main(argv: list[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if all weights are equal."""
    options = parse(__doc__, argv)
    batches = load(options.device, epochs=1 if options.smoke else 30)
    theirs, _ = train(legacy, batches, options.device)
    ours, distance = train(functional, batches, options.device)
    return verdict(theirs, ours, f"gan: distance {distance:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
