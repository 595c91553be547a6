"""The gradients of the players of a game, each with respect to its own parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import gradkit
from benchmarks import models
from benchmarks.harness import Side, measure
from benchmarks.plan import Plan
from benchmarks.row import Row, timed

IN_TURN = "autograd.grad for each player"
# Width and batch.
_SIZES = ((64, 32), (256, 64))
_QUICK = ((4, 2),)


def rows(plan: Plan) -> Iterator[Row]:
    """Yield a row for each size of a generator and a discriminator of three layers each."""
    for width, batch in _QUICK if plan.quick else _SIZES:
        timings = measure(sides(width, batch, plan.device), plan.device, plan.effort)
        what = f"simultaneous_grads, generator and discriminator, W{width} D3 B{batch}"
        yield timed(what, IN_TURN, timings, theirs="raw", limit=None)


def sides(width: int, batch: int, device: torch.device) -> dict[str, Side]:
    """Return gradkit's way and the hand-written one, from losses on one forward pass."""
    generator = models.mlp(width, 3).to(device)
    critic = models.mlp(width, 3, 1).to(device)
    of_generator, of_critic = list(generator.parameters()), list(critic.parameters())

    def build() -> dict[str, Tensor]:
        real, noise = torch.randn(2, batch, width, device=device)
        made = generator(noise)
        judged = critic(made).mean()
        return {"generator": -judged, "critic": judged - critic(real).mean()}

    def ours(losses: dict[str, Tensor]) -> object:
        return gradkit.simultaneous_grads(losses, {"generator": generator, "critic": critic})

    def raw(losses: dict[str, Tensor]) -> object:
        first = torch.autograd.grad(losses["generator"], of_generator, retain_graph=True)
        return first, torch.autograd.grad(losses["critic"], of_critic)

    return {"gradkit": Side(build, ours), "raw": Side(build, raw)}
