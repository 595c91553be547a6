"""Three planted bugs, found by comparing gradients across layouts.

A small mixture of experts reads padded sequences; each bug below is one that training runs have
had, and none of them raises:

- the loss is a mean over the tokens of a micro-batch, and the micro-batches have unequal numbers;
- a checkpoint with `use_reentrant=True` runs the router without a graph, so that the balancing loss
  which is computed inside reaches no router;
- the norm for clipping is summed over the ranks, though DDP has reduced the gradients before.

`gradkit.distributed.parity` runs the step in one process and in the layout, compares each
parameter's gradient, and names the difference. Beside each bug runs its mended form.

    python examples/parity.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit.distributed import BatchPart, Layout, ParityReport, parity

VOCABULARY, WIDTH, ROWS, LENGTH, PADDING = 11, 8, 8, 6, -100


class Batch(NamedTuple):
    """Tokens, and what follows each."""

    tokens: Tensor  # [ROWS, LENGTH]
    following: Tensor  # [ROWS, LENGTH], with padding


def batch() -> Batch:
    """Return sequences, of which the later ones are mostly padding."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    is_padding = torch.arange(LENGTH) > LENGTH - torch.arange(ROWS)[:, None] * LENGTH // ROWS
    return Batch(tokens, tokens.roll(-1, 1).masked_fill(is_padding, PADDING))


class Experts(nn.Module):
    """Two experts and their router, which leaves its balancing loss in `balance`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the experts, as the router weighs them."""
        weights: Tensor = self.router(x).softmax(-1)
        self.balance = weights.square().mean()
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[..., None, :]).sum(-1)


def build() -> nn.Module:
    """Return the model, in float64: then a factor is beyond doubt."""
    parts = nn.Embedding(VOCABULARY, WIDTH), Experts(), nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(*parts).double()


def token_loss(model: nn.Module, part: BatchPart, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of the tokens of a part."""
    tokens, following = map(part.rows, batch())
    logits = model(tokens).flatten(0, 1)
    return cross_entropy(logits, following.flatten(), reduction=reduction, ignore_index=PADDING)


# --- A mean of means -----------------------------------------------------------------------------


def mean_of_each(model: nn.Module, part: BatchPart) -> Tensor:
    """The bug: each part divides by its own number of tokens."""
    return token_loss(model, part)


def mean_of_all(model: nn.Module, part: BatchPart) -> Tensor:
    """Mended: all divide by the number of tokens of the batch."""
    count = (batch().following != PADDING).sum()
    return token_loss(model, part, "sum") / count * part.count


# --- An auxiliary loss that reaches no router ----------------------------------------------------


def with_balance(model: Any, part: BatchPart) -> dict[str, Tensor]:
    """Both losses by name, so that one that is missing is named."""
    return {"tokens": mean_of_all(model, part), "balance": model[1].balance}


def checkpointed(model: nn.Module, mesh: Any, *, reentrant: bool) -> nn.Module:
    """Recompute the experts in the backward pass; the reentrant kind runs them without a graph."""
    experts: Any = model.get_submodule("1")
    experts.forward = partial(checkpoint, experts.forward, use_reentrant=reentrant)
    return model


# --- A norm that counts squares twice ------------------------------------------------------------


class SummingNorms(DistributedDataParallel):
    """The bug."""


def clipped(model: nn.Module, part: BatchPart) -> None:
    """Run the backward pass and clip; DDP has reduced the gradients, which all ranks have whole."""
    gradkit.backward_(mean_of_all(model, part))
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    squares = torch.stack([grad.square().sum() for grad in grads]).sum()
    if isinstance(model, SummingNorms):
        dist.all_reduce(squares)
    for grad in grads:
        grad.mul_(0.01 / squares.sqrt())


def sum_norms(model: nn.Module, mesh: Any) -> nn.Module:
    """Wrap the model, with the bug."""
    return SummingNorms(model)


class Check(NamedTuple):
    """A step, the layouts in which it runs, and what the report must say of each."""

    bug: str
    step: Callable[..., Any]
    layouts: list[str | Layout]
    kinds: list[set[str]]


def checks() -> list[Check]:
    """Return the three bugs, and beside each its mended form."""
    reentrant = Layout("reentrant", partial(checkpointed, reentrant=True), "one")
    other = Layout("checkpointed", partial(checkpointed, reentrant=False), "one")
    named = "a mean of means", "without loss 'balance'", "x 0.7071: 1 / the root of the world size"
    doubled = Layout("summed norms", sum_norms)
    return [
        Check(named[0], mean_of_each, ["accumulation"], [{named[0]}]),
        Check("", mean_of_all, ["accumulation"], [set()]),
        Check("a loss without router", with_balance, [reentrant, other], [{named[1]}, set()]),
        Check("a doubled norm", clipped, [doubled, "ddp"], [{named[2]}, set()]),
    ]


def kinds(report: ParityReport) -> list[set[str]]:
    """Return what a report says of the parameters that differ, by layout."""
    return [{one.kind for one in of.values()} for of in report.differences.values()]


def main() -> int:
    """Run all checks, and return the exit status: 0 if each bug is named, and gone when mended."""
    console, failed = Console(), []
    for check in checks():
        report = parity(build, check.step, check.layouts)
        if check.bug:
            console.rule(check.bug)
        console.print(report)
        if kinds(report) != check.kinds or report.failed or report.skipped:
            failed.append(f"{check.bug or 'mended'}: {report}")
    for text in failed:
        Console(stderr=True).print(f"[bold red]FAILED[/] {text}")
    if not failed:
        console.print("[bold green]OK[/] three bugs found and named; mended, all are equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
