"""Models and steps for `parity`, right and with planted bugs; ranks import them from here."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradkit.distributed import BatchPart, Layout

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(8, 4, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randn(8, 2, generator=_GENERATOR, dtype=torch.float64)
COUNTED = torch.tensor([True, True, True, True, False, True, False, False])  # 4 in half, 1 in half


class Routed(nn.Module):
    """Two experts whose outputs a router weighs; what a wrapper plants is in `bug`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 6) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 2)
        self.spare = nn.Linear(1, 1)  # used where a step asks for it
        self.bug = ""

    def forward(self, x: Tensor, spare: bool = False) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        mixed = sum(weights[:, i : i + 1] * each(x) for i, each in enumerate(self.experts))
        out = self.head(self.dropout(mixed.tanh()))
        return out + self.spare(x[:, :1]) if spare else out, weights


def build() -> nn.Module:
    model = Routed().double()
    model.spare.requires_grad_(False)
    return model


def build_with_spare() -> nn.Module:
    return Routed().double()


def build_with_dropout() -> nn.Module:
    model = Routed(0.5).double()
    model.spare.requires_grad_(False)
    return model


def build_differently() -> nn.Module:
    torch.manual_seed(os.getpid())
    return build()


def plain(module: Any) -> Any:
    """Return the module that DDP wraps, or the module."""
    return getattr(module, "module", module)


def error_of(out: Tensor, part: BatchPart) -> Tensor:
    return (out - part.rows(Y)).square().mean(-1)


def step(module: Any, part: BatchPart) -> dict[str, Tensor]:
    """Two losses: the fit, and an auxiliary one of the router."""
    bug = plain(module).bug
    out, weights = (plain(module) if bug == "missing reduction" else module)(part.rows(X))
    losses = {"fit": error_of(out, part).mean(), "aux": weights.square().sum(-1).mean()}
    if bug == "auxiliary loss":
        losses["aux"] = weights.detach().square().sum(-1).mean() + 0 * losses["fit"]
    if bug == "auxiliary loss twice":
        losses["aux"] = 2 * losses["aux"]
    if bug == "lost micro-batch" and part.index == 1:
        losses = {name: 0 * loss for name, loss in losses.items()}
    if bug == "sum":
        losses = {name: dist.get_world_size() * loss for name, loss in losses.items()}
    return losses


def counted(module: Any, part: BatchPart) -> Tensor:
    """The mean over the rows that count, of which the parts have unequal numbers."""
    keep = part.rows(COUNTED)
    losses = error_of(module(part.rows(X))[0], part)[keep]
    return losses.sum() / COUNTED.sum() * part.count


def mean_of_counted(module: Any, part: BatchPart) -> Tensor:
    """The mean over the rows of the part that count: over parts, a mean of means."""
    return error_of(module(part.rows(X))[0], part)[part.rows(COUNTED)].mean()


def clipped(module: Any, part: BatchPart) -> None:
    """Backward and clipping by hand; all ranks have the whole gradient."""
    error_of(module(part.rows(X))[0], part).mean().div(part.micro_batches).backward()
    if part.is_last:
        grads = [param.grad for param in module.parameters() if param.grad is not None]
        squares = sum(grad.square().sum() for grad in grads)
        if plain(module).bug == "doubled norm":
            dist.all_reduce(squares)
        for grad in grads:
            grad.mul_(0.01 / squares.sqrt())


def dropped(module: Any, part: BatchPart) -> Tensor:
    return error_of(module(part.rows(X))[0], part).mean()


def with_frozen(module: Any, part: BatchPart) -> Tensor:
    """A step in which one rank freezes a layer."""
    if plain(module).bug == "frozen in the step" and part.index == 1:
        plain(module).head.requires_grad_(False)
    return dropped(module, part)


def with_spare(module: Any, part: BatchPart) -> Tensor:
    """A step in which one rank leaves a layer out."""
    spare = plain(module).bug != "unused" or part.index == 0
    return error_of(module(part.rows(X), spare)[0], part).mean()


def default_step(module: Any, part: BatchPart) -> Tensor:
    return (module(part.rows(X)) - part.rows(Y)).square().mean()


def raising(module: Any, part: BatchPart) -> Tensor:
    if part.index == 1:
        raise ValueError("no such row")
    return dropped(module, part)


def wrap(module: Any, mesh: Any, *, bug: str = "") -> nn.Module:
    """Wrap in DDP, with a bug that the step reads."""
    module.bug = bug
    return module if mesh is None else DistributedDataParallel(module)


def bugged(bug: str, **options: Any) -> Layout:
    return Layout(bug, partial(wrap, bug=bug), **options)


def freeze_on_one(module: Any, mesh: Any) -> nn.Module:
    wrapped = wrap(module, mesh)
    module.head.weight.requires_grad_(dist.get_rank() == 0)
    return wrapped


def seed_each(module: Any, mesh: Any) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return module


def die(module: Any, mesh: Any) -> nn.Module:
    if dist.get_rank() == 1:
        os._exit(3)
    return wrap(module, mesh)


def forget_random_state(module: Any, mesh: Any) -> nn.Module:
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    module.dropout.forward = partial(checkpoint, module.dropout.forward, **options)
    return module


def tensor_plan(module: Any, mesh: Any) -> nn.Module:
    whole = ColwiseParallel(output_layouts=Replicate())
    styles = {
        "experts.0": whole,
        "experts.1": whole,
        "head": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(module, mesh, styles)


TENSOR = Layout("tensor", tensor_plan, "repeat")
