"""The ways to get a gradient for each sample of a batch, forward pass included."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

import gradkit
from benchmarks import peers
from benchmarks.harness import Side
from benchmarks.models import Classifier

Batch: TypeAlias = tuple[Tensor, Tensor]
VMAP = "torch.func.vmap(grad)"
# Where the libraries leave the gradients.
_PLACES = ("grad", "grad_sample", "grad_batch")


def gradkits(task: Classifier, chunk_size: int | None = None) -> Side:
    """Return gradkit's way."""
    by_sample = gradkit.func.per_sample_grads(task.loss, chunk_size=chunk_size)
    params = task.params
    return Side(task.build, lambda batch: by_sample(params, *batch))


def eager(task: Classifier) -> Side:
    """Return gradkit's way for losses that exist; it has one pass where no hook was registered."""

    def run(batch: Batch) -> object:
        losses = functional.cross_entropy(task.module(batch[0]), batch[1], reduction="none")
        return gradkit.per_loss_grads(losses, task.module, strategy="auto")

    return Side(task.build, run)


def vmapped(task: Classifier, chunk_size: int | None = None) -> Side:
    """Return the way of torch's tutorial."""
    by_sample = vmap(grad(task.loss), in_dims=(None, 0, 0), chunk_size=chunk_size)
    params = task.params
    return Side(task.build, lambda batch: by_sample(params, *batch))


def _expanded(task: Classifier) -> Side:
    # torch has it, but not as a public name.
    expand = import_module("torch.nn.utils._per_sample_grad").call_for_per_sample_grads

    def run(batch: Batch) -> dict[str, Tensor]:
        scores = expand(task.module, loss_reduction="sum")(batch[0])
        _sum_of_losses(scores, batch[1]).backward()  # type: ignore[no-untyped-call]
        return _left_in(task.module, "grad_sample")

    return Side(_from_clean(task), run)


def _opacus(task: Classifier) -> Side:
    wrapped = import_module("opacus").GradSampleModule(task.module, loss_reduction="sum")

    def run(batch: Batch) -> dict[str, Tensor]:
        _sum_of_losses(wrapped(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        return _left_in(task.module, "grad_sample")

    return Side(_from_clean(task), run)


def _backpack(task: Classifier) -> Side:
    library, extension = import_module("backpack"), import_module("backpack.extensions").BatchGrad()
    module = library.extend(task.module)
    sum_of_losses = library.extend(nn.CrossEntropyLoss(reduction="sum"))

    def run(batch: Batch) -> dict[str, Tensor]:
        with library.backpack(extension):
            sum_of_losses(module(batch[0]), batch[1]).backward()
        return _left_in(module, "grad_batch")

    return Side(_from_clean(task), run)


PEERS: dict[str, Callable[[Classifier], Side]] = {
    VMAP: vmapped,
    "ExpandedWeights": _expanded,
    "BackPACK": _backpack,
    "Opacus": _opacus,
}


def peer(name: str, task: Classifier) -> tuple[dict[str, Side], str]:
    """Return a peer's way, on a copy of the module, if it gives the same gradients as gradkit.

    Args:
        name: Which of `PEERS`.
        task: What to differentiate.

    Returns:
        Its side, by its name, and nothing; or no side, and why.
    """
    side, problem = peers.found(lambda: PEERS[name](task.copy()), lambda: _agree(name, task))
    return ({} if side is None else {name: side}), problem


def _agree(name: str, task: Classifier) -> bool:
    # In double precision, where no device rounds the products of a convolution more coarsely.
    found: list[Any] = []
    for make in (gradkits, PEERS[name]):
        side = make(task.copy(torch.float64))
        torch.manual_seed(0)
        found.append(side.run(side.build()))
    ours, theirs = found
    return ours.keys() == theirs.keys() and all(
        grads.shape == theirs[key].shape and torch.allclose(grads, theirs[key])
        for key, grads in ours.items()
    )


def _sum_of_losses(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels, reduction="sum")


def _left_in(module: nn.Module, place: str) -> dict[str, Tensor]:
    return {name: getattr(param, place) for name, param in module.named_parameters()}


def _from_clean(task: Classifier) -> Callable[[], Batch]:
    def build() -> Batch:
        for param in task.module.parameters():
            for place in _PLACES:
                setattr(param, place, None)
        return task.build()

    return build
