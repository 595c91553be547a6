"""Accelerate: two models, micro-batches and clipping, on one process or several.

    python examples/with/accelerate_loop.py [--smoke]
    torchrun --nproc-per-node 2 examples/with/accelerate_loop.py
    accelerate launch --mixed_precision bf16 examples/with/accelerate_loop.py

`usual` and `functional` are the same loop. Their weights are equal bit for bit in one process. In
several they are equal up to rounding: the usual loop adds the micro-batches before it reduces.
"""

from __future__ import annotations

import sys

import torch
from _shared import digits, parse, verdict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradkit

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("Accelerate is not installed: pip install gradkit[accelerate]") from error

MICRO_BATCHES = 2
MAX_NORM = 0.5


def prepare(accelerator: Accelerator, count: int | None, batch_size: int = 32) -> tuple:
    """Return an encoder, a head, the optimizer of each, and the batches, all prepared."""
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Linear(64, 32), nn.Tanh()), nn.Linear(32, 10)
    optimizers = (
        torch.optim.AdamW(encoder.parameters(), lr=1e-3),
        torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9),
    )
    batches = DataLoader(TensorDataset(*digits(count)), batch_size=batch_size, drop_last=True)
    return accelerator.prepare(encoder, head, *optimizers, batches)


def usual(accelerator: Accelerator, encoder, head, encoder_opt, head_opt, batches) -> None:
    """Train through `.grad`, as Accelerate's documentation does."""
    for images, labels in batches:
        with accelerator.accumulate(encoder, head):
            loss = cross_entropy(head(encoder(images)), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_([*encoder.parameters()], MAX_NORM)
            for optimizer in (encoder_opt, head_opt):
                optimizer.step()
                optimizer.zero_grad()


def functional(accelerator: Accelerator, encoder, head, encoder_opt, head_opt, batches) -> None:
    """Train with gradients as values."""
    calls = gradkit.distributed if accelerator.use_distributed else gradkit
    total = None
    for images, labels in batches:
        with accelerator.accumulate(encoder, head):
            loss = cross_entropy(head(encoder(images)), labels)
            loss = loss / accelerator.gradient_accumulation_steps
            _, grads = calls.value_and_grads(loss, {"encoder": encoder, "head": head})
            total = grads if total is None else gradkit.tree.add_(total, grads)
            if accelerator.sync_gradients:
                gradkit.step_(encoder_opt, encoder, total["encoder"], max_norm=MAX_NORM)
                gradkit.step_(head_opt, head, total["head"])
                total = None


def train(loop, accelerator, count):
    encoder, head, *rest = prepare(accelerator, count)
    loop(accelerator, encoder, head, *rest)
    return nn.ModuleList(accelerator.unwrap_model(m) for m in (encoder, head))


def main(argv: list[str] | None = None) -> int:
    options = parse(__doc__, argv)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    count = 512 if options.smoke else None
    a, b = (train(loop, accelerator, count) for loop in (usual, functional))
    return verdict(a, b, f"accelerate {accelerator.num_processes}", atol=0 if accelerator.num_processes == 1 else 1e-5)


if __name__ == "__main__":
    sys.exit(main())
