"""A small language model in micro-batches on two processes, equal to one process.

Sentences have unequal lengths, so micro-batches and processes hold unequal numbers of tokens. The
loss of a step is the mean over the tokens of all of them. A mean of the micro-batches' means, which
loops usually compute, weighs a token of a short sentence more: this measures by how much.

`gradkit.Accumulator` adds the gradients of sums, counts the tokens, and reduces once a step. The
weights must be those of one process on whole batches, up to the rounding of double precision.

    torchrun --nproc-per-node 2 examples/token_weighted.py [--smoke] [--device cuda]

Started without torchrun, it calls torchrun for two processes.

Source: https://github.com/huggingface/transformers/issues/34191
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

# Before a group exists: see docs/several_processes.md.
import torch.distributed.nn.functional  # noqa: F401
from _script import options_of
from multitask_ddp import backend_for, own_device, with_torchrun
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence

import gradkit

WORDS = 12
SENTENCES = 48  # in a batch
MICRO_BATCH = 5  # sentences
PADDING = -100  # a target that does not count
TOLERANCE = 1e-9  # of the weights against those of one process, relatively


class LanguageModel(nn.Module):
    """The logits of each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """From `[sentences, words]` to `[sentences, words, WORDS]`."""
        out: Tensor = self.head(self.rnn(self.embed(words))[0])
        return out


def sentences_of(step: int) -> list[Tensor]:
    """Return a batch of sentences, the same on all processes: each word follows from the last."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 30, (SENTENCES,), generator=generator).tolist()
    starts = torch.randint(WORDS, (SENTENCES,), generator=generator).tolist()
    return [
        (start + torch.arange(n) ** 2) % WORDS for n, start in zip(lengths, starts, strict=True)
    ]


def nats(model: nn.Module, sentences: Sequence[Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Return the sum of the tokens' losses, and the number of tokens."""
    words = pad_sequence([s[:-1] for s in sentences], batch_first=True).to(device)
    targets = pad_sequence([s[1:] for s in sentences], True, PADDING).to(device)
    logits = model(words).flatten(0, 1)
    total = cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, sum(len(sentence) - 1 for sentence in sentences)


def micro_batches(sentences: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield this process's part of a batch, a few sentences at a time."""
    own = sentences[dist.get_rank() :: dist.get_world_size()]
    for start in range(0, len(own), MICRO_BATCH):
        yield own[start : start + MICRO_BATCH]


def mean_of_means(
    replica: DistributedDataParallel, sentences: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the gradient that a loop computes that divides by the number of micro-batches."""
    grads = []
    with replica.no_sync():  # the gradients are this process's
        for part in micro_batches(sentences):
            total, count = nats(replica.module, part, device)
            grads.append(gradkit.value_and_grads(total / count, replica.module)[1])
    mean = gradkit.tree.scale(gradkit.tree.add(*grads), 1 / len(grads))
    return flat(gradkit.distributed.all_reduce(mean))


def flat(grads: dict[str, Tensor | None]) -> Tensor:
    """Return all gradients as one vector."""
    return torch.cat([grad.flatten() for grad in grads.values() if grad is not None])


def experiment(steps: int, device: torch.device) -> tuple[list[float], float, list[float]]:
    """Train both; return losses, the weights' difference, and the errors of means of means."""
    torch.manual_seed(0)
    alone = LanguageModel().to(device).double()
    replica = DistributedDataParallel(LanguageModel().to(device).double())
    replica.module.load_state_dict(alone.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (alone, replica)]
    losses, errors = [], []
    for step in range(steps):
        sentences = sentences_of(step)
        total, count = nats(alone, sentences, device)
        _, whole = gradkit.value_and_grads(total / count, alone)

        accumulator = gradkit.Accumulator(replica)
        for part in micro_batches(sentences):
            accumulator.add_(*nats(replica, part, device))
        loss, grads = accumulator.mean()

        wrong = mean_of_means(replica, sentences, device)
        errors.append(float((wrong - flat(whole)).norm() / flat(whole).norm()))
        gradkit.step_(optimizers[0], alone, whole)
        gradkit.step_(optimizers[1], replica, grads)
        losses.append(loss.item())
    a, b = (parameters_to_vector(m.parameters()).detach() for m in (alone, replica))
    return losses, float((a - b).norm() / a.norm()), errors


def failed_checks(losses: list[float], difference: float) -> list[str]:
    """Return what is not as claimed."""
    failed = []
    if not difference <= TOLERANCE:
        failed.append(f"the weights differ by {difference:.1e} from those of one process")
    if not losses[-1] < losses[0]:
        failed.append(f"the loss is {losses[-1]:.2f} nats a token, from {losses[0]:.2f}")
    return failed


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    if not dist.is_torchelastic_launched():
        return with_torchrun(sys.argv[1:] if argv is None else argv, __file__)
    device = own_device(options.device)
    dist.init_process_group(backend_for(device))
    try:
        # No DDP module may outlive the group.
        losses, difference, errors = experiment(10 if options.smoke else 60, device)
    finally:
        size, is_first = dist.get_world_size(), dist.get_rank() == 0
        dist.destroy_process_group()
    failed = failed_checks(losses, difference)
    console = Console(quiet=not is_first)
    console.print(f"loss            {losses[0]:.3f} to {losses[-1]:.3f} nats a token")
    console.print(f"mean of means   its gradient is {max(errors):.1%} off, at most")
    for check in failed:
        console.print(f"[bold red]FAILED[/] {check}")
    if not failed:
        same = f"{size} processes have the weights of one, to {difference:.0e}"
        console.print(f"[bold green]OK[/] {same}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
