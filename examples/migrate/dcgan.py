"""A GAN whose players take turns, as in DCGAN: the critic steps, then the generator.

    python examples/migrate/dcgan.py [--smoke] [--device cuda]

`legacy` and `functional` are the same loop. The generator's loss is computed after the critic's
step, on the same generated images (Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661, with
the generator's loss that does not saturate). The weights must be equal bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from gan import NOISE, load
from side_by_side import parse, verdict
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy
from torch.optim import Adam

import gradkit

Loop: TypeAlias = Callable[[nn.Module, nn.Module, Sequence[Tensor]], float]


def adam(player: nn.Module) -> Adam:
    """Return the optimizer of one player."""
    return Adam(player.parameters(), lr=1e-3, betas=(0.5, 0.999))


def legacy(generator: nn.Module, critic: nn.Module, batches: Sequence[Tensor]) -> float:
    """Train through `.grad`, and return how many of the last images the critic takes for real."""
    optimizer_g, optimizer_d = adam(generator), adam(critic)
    for real in batches:
        optimizer_d.zero_grad()  # also of what the generator's loss has left here
        label = torch.ones(len(real), 1, device=real.device)
        binary_cross_entropy(critic(real), label).backward()  # type: ignore[no-untyped-call]
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        label.fill_(0)  # the loss above has had its backward pass
        binary_cross_entropy(critic(fake.detach()), label).backward()  # type: ignore[no-untyped-call]
        optimizer_d.step()

        optimizer_g.zero_grad()
        label.fill_(1)
        judged = critic(fake)
        binary_cross_entropy(judged, label).backward()  # type: ignore[no-untyped-call]
        optimizer_g.step()
    share: Tensor = (judged > 0.5).float().mean()
    return share.item()


def functional(generator: nn.Module, critic: nn.Module, batches: Sequence[Tensor]) -> float:
    """Train with gradients as values, and return the same."""
    optimizer_g, optimizer_d = adam(generator), adam(critic)
    for real in batches:
        # Two tensors: one that is filled anew would change while the first loss needs it.
        ones = torch.ones(len(real), 1, device=real.device)
        zeros = torch.zeros_like(ones)
        loss_real = binary_cross_entropy(critic(real), ones)
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        losses = {"real": loss_real, "fake": binary_cross_entropy(critic(fake), zeros)}
        # One pass a loss, added in order, is what two calls of .backward() accumulate. They go to
        # the critic's weights only: the graph of `fake` stays for the generator's loss.
        each = gradkit.per_loss_grads(losses, critic)
        gradkit.step_(optimizer_d, critic, gradkit.tree.add(each["real"], each["fake"]))

        judged = critic(fake)  # by the critic that has stepped
        # This pass goes through the critic, and computes no gradient of its weights.
        _, grads = gradkit.value_and_grads(binary_cross_entropy(judged, ones), generator)
        gradkit.step_(optimizer_g, generator, grads)
    share: Tensor = (judged > 0.5).float().mean()
    return share.item()


def train(loop: Loop, batches: Sequence[Tensor], device: torch.device) -> tuple[nn.Module, float]:
    """Return both players trained by this loop, and what the loop returns."""
    torch.manual_seed(0)  # both loops start from the same weights, and draw the same noise
    generator = nn.Sequential(
        nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.BatchNorm1d(64),
        nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid(),
    )  # fmt: skip
    players = nn.ModuleDict({"generator": generator, "critic": critic}).to(device)
    return players, loop(generator, critic, batches)


def main(argv: list[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if all weights are equal."""
    options = parse(__doc__, argv)
    batches = load(options.device, epochs=1 if options.smoke else 15)
    theirs, _ = train(legacy, batches, options.device)
    ours, share = train(functional, batches, options.device)
    return verdict(theirs, ours, f"dcgan: {share:.0%} of the last images pass for real")


if __name__ == "__main__":
    torch.set_num_threads(1)  # with matrices this small, threads mostly wait for each other
    sys.exit(main())
