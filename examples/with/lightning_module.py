"""Lightning: two losses with an aggregator, and a GAN, by manual optimization.

    python examples/with/lightning_module.py [--smoke]
    torchrun --nproc-per-node 2 examples/with/lightning_module.py

Each module is written twice, with `manual_backward` and with gradkit. The weights are equal up to
rounding, with micro-batches, clipping and mixed precision, in one process or several.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from _shared import digits, parse, verdict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradkit

try:
    import lightning
    from lightning.pytorch.plugins import MixedPrecision
except ImportError as error:
    raise ImportError("Lightning is not installed: pip install gradkit[lightning]") from error

MICRO_BATCHES, MAX_NORM, NOISE = 2, 0.5, 8
WEIGHTS = {"digit": 1.0, "image": 0.5}
Module = TypeVar("Module", bound=lightning.LightningModule)


class TwoLosses(lightning.LightningModule):
    """A classifier that also reconstructs the image: what both versions share."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.Tanh())
        self.heads = nn.ModuleDict({"digit": nn.Linear(32, 10), "image": nn.Linear(32, 64)})

    def losses(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the losses of a micro-batch, so that their sums over a step are means."""
        images, labels = batch
        features = self.trunk(images)
        digit = cross_entropy(self.heads["digit"](features), labels)
        image = mse_loss(self.heads["image"](features), images)
        return {"digit": digit / MICRO_BATCHES, "image": image / MICRO_BATCHES}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class UsualTwoLosses(TwoLosses):
    """One weighted sum, and `.grad`."""

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Accumulate the gradients of a micro-batch; step after the last of them."""
        optimizer = self.optimizers()
        losses = self.losses(batch)
        self.manual_backward(sum(WEIGHTS[name] * loss for name, loss in losses.items()))
        if (index + 1) % MICRO_BATCHES == 0:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()  # .grad is still scaled
            self.clip_gradients(optimizer, MAX_NORM * scale, "norm")
            optimizer.step()
            optimizer.zero_grad()


class GradkitTwoLosses(TwoLosses):
    """The gradient of each loss, combined, and the conflicts logged."""

    total: Any = None

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Add the gradients of a micro-batch; step after the last of them."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        losses = self.losses(batch)
        if scaler is not None:
            losses = gradkit.tree.map(scaler.scale, losses)
        calls = gradkit.distributed if self.trainer.world_size > 1 else gradkit
        per_loss = calls.per_loss_grads(losses, self)
        self.log("conflicts", gradkit.report.conflicts(per_loss).share)

        grads = gradkit.combine(per_loss, WEIGHTS)  # or an aggregator of TorchJD
        self.total = grads if self.total is None else gradkit.tree.add_(self.total, grads)
        if (index + 1) % MICRO_BATCHES == 0:
            scale = 1.0 if scaler is None else scaler.get_scale()
            clipped, _ = gradkit.tree.clip_by_global_norm(self.total, MAX_NORM * scale)
            gradkit.step_(self.optimizers(), self, clipped)
            self.total = None


class Gan(lightning.LightningModule):
    """Two players and two optimizers: what both versions share."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 64))
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the generator and the critic."""
        players = (self.generator, self.critic)
        return [torch.optim.SGD(player.parameters(), lr=0.05) for player in players]


class UsualGan(Gan):
    """A `detach()`, a second pass through the critic, and gradients cleared in between."""

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Step both players, from the same weights."""
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), NOISE, device=self.device))
        of_generator.zero_grad()
        self.manual_backward(softplus(-self.critic(fake)).mean())
        of_critic.zero_grad()  # here: the generator's loss has left gradients in the critic
        on_fake = softplus(self.critic(fake.detach())).mean()
        self.manual_backward(on_fake + softplus(-self.critic(batch[0])).mean())
        of_generator.step()
        of_critic.step()


class GradkitGan(Gan):
    """Each loss is differentiated with respect to its own player."""

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        """Step both players, from the same weights."""
        fake = self.generator(torch.randn(len(batch[0]), NOISE, device=self.device))
        on_fake, on_real = self.critic(fake), self.critic(batch[0])
        losses = {
            "G": softplus(-on_fake).mean(),
            "D": softplus(on_fake).mean() + softplus(-on_real).mean(),
        }
        calls = gradkit.distributed if self.trainer.world_size > 1 else gradkit
        grads = calls.simultaneous_grads(losses, {"G": self.generator, "D": self.critic})
        of_generator, of_critic = self.optimizers()
        gradkit.step_(of_generator, self.generator, grads["G"])
        gradkit.step_(of_critic, self.critic, grads["D"])


def float16() -> dict[str, Any]:
    """Return the options of a Trainer for float16 with a GradScaler, which run on a CPU, too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def train(
    module: type[Module], count: int | None, batch_size: int = 32, **options: Any
) -> tuple[Module, lightning.Trainer]:
    """Return a module that has been trained for one epoch, and its Trainer."""
    torch.manual_seed(0)
    model = module()
    rank, processes = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    data = TensorDataset(*digits(count))
    sampler: DistributedSampler[tuple[Tensor, ...]]
    # Lightning's own sampler shuffles: one process would not see the same batches.
    sampler = DistributedSampler(data, processes, rank, shuffle=False)
    batches = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        # The usual GAN needs it, whose losses reach one player each; gradkit does not.
        strategy="ddp_find_unused_parameters_true" if processes > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, batches)
    return model, trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train each module twice, and return the exit status: 0 if the weights are equal."""
    options = parse(__doc__, argv)
    count = 512 if options.smoke else None
    runs: dict[str, tuple[type[Any], type[Any], Any, float]] = {
        "two losses": (UsualTwoLosses, GradkitTwoLosses, dict, 1e-5),
        "two losses, float16": (UsualTwoLosses, GradkitTwoLosses, float16, 1e-3),
        "GAN": (UsualGan, GradkitGan, dict, 1e-5),
    }
    failed = 0
    for name, (usual, functional, precision, atol) in runs.items():
        theirs, _ = train(usual, count, **precision())
        ours, _ = train(functional, count, **precision())
        failed |= verdict(theirs, ours, name, atol)
    return failed


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    sys.exit(main())
