"""Accelerate: two models, micro-batches and clipping, on one process or several.

    python examples/with/accelerate_loop.py [--smoke]
    torchrun --nproc-per-node 2 examples/with/accelerate_loop.py

`usual` and `functional` are the same loop. Their weights are equal bit for bit in one process. In
several they are equal up to rounding: the usual loop adds the micro-batches before it reduces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from _shared import digits, parse, verdict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradkit

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install gradkit[accelerate]") from error

MICRO_BATCHES = 2
MAX_NORM = 0.5


class Prepared(NamedTuple):
    """What `accelerator.prepare` returns: two models, an optimizer for each, and the batches."""

    encoder: nn.Module
    head: nn.Module
    encoder_optimizer: torch.optim.Optimizer
    head_optimizer: torch.optim.Optimizer
    batches: Iterable[Sequence[Tensor]]


def prepare(accelerator: Accelerator, count: int | None, batch_size: int) -> Prepared:
    """Return new models and optimizers, and batches of digits."""
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(64, 32), nn.Tanh()), nn.Linear(32, 10)
    encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(*digits(count)), batch_size, drop_last=True)
    return Prepared(*accelerator.prepare(encoder, head, encoder_optimizer, head_optimizer, batches))


def usual(accelerator: Accelerator, run: Prepared) -> None:
    """Train through `.grad`."""
    for images, labels in run.batches:
        with accelerator.accumulate(run.encoder, run.head):
            loss = cross_entropy(run.head(run.encoder(images)), labels)
            accelerator.backward(loss)  # of the loss, divided by the number of micro-batches
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.encoder.parameters(), MAX_NORM)
            for optimizer in (run.encoder_optimizer, run.head_optimizer):
                optimizer.step()
                optimizer.zero_grad()


def functional(accelerator: Accelerator, run: Prepared) -> None:
    """Train with gradients as values."""
    calls = gradkit.distributed if accelerator.use_distributed else gradkit
    total: Any = None
    for images, labels in run.batches:
        with accelerator.accumulate(run.encoder, run.head):
            loss = cross_entropy(run.head(run.encoder(images)), labels)
            loss = loss / accelerator.gradient_accumulation_steps
            _, grads = calls.value_and_grads(loss, [run.encoder, run.head])
            total = grads if total is None else gradkit.tree.add_(total, grads)
            if accelerator.sync_gradients:
                of_encoder, of_head = total
                gradkit.step_(run.encoder_optimizer, run.encoder, of_encoder, max_norm=MAX_NORM)
                gradkit.step_(run.head_optimizer, run.head, of_head)
                total = None


def train(
    loop: Callable[[Accelerator, Prepared], None],
    accelerator: Accelerator,
    count: int | None,
    batch_size: int = 32,
) -> nn.Module:
    """Return both models, trained by this loop for one epoch, without Accelerate's wrappers."""
    run = prepare(accelerator, count, batch_size)
    loop(accelerator, run)
    return nn.ModuleList(accelerator.unwrap_model(model) for model in (run.encoder, run.head))


def main(argv: Sequence[str] | None = None) -> int:
    """Train with both loops, and return the exit status: 0 if the weights are equal."""
    options = parse(__doc__, argv)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    count = 512 if options.smoke else None
    theirs, ours = (train(loop, accelerator, count) for loop in (usual, functional))
    processes = accelerator.num_processes
    atol = 0.0 if processes == 1 else 1e-5
    return verdict(theirs, ours, f"accelerate, processes: {processes}", atol)


if __name__ == "__main__":
    sys.exit(main())
