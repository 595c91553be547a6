"""Streams are a law: no call of gradkit has a hazard where the user's own streams wait properly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradkit
from gradkit._core import pytree
from tests.accelerator import emulation

# The node that would write `.grad` is of the stream on which it was made.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node")

Losses = dict[str, Tensor]


def elements(losses: Losses) -> Tensor:
    return losses["each"]


def scalars(losses: Losses) -> Losses:
    return {name: loss for name, loss in losses.items() if loss.dim() == 0}


def retained(losses: Losses, model: nn.Module, hidden: Tensor) -> Any:
    with gradkit.safe_retain(hidden) as kept:
        _, grads = gradkit.value_and_grads(scalars(losses), model)
    return kept.grads, grads


def accumulated(losses: Losses, model: nn.Module) -> Any:
    total = gradkit.Accumulator(model)
    total.add_(losses["b"], 15)
    return total.mean()


def of_weights(grams: Tensor) -> Tensor:
    return torch.ones_like(grams[0])


# From losses, a model, and what is in the middle of it, to a tree of results.
CALLS: dict[str, Callable[[Losses, nn.Module, Tensor], Any]] = {
    "value_and_grads": lambda x, m, h: gradkit.value_and_grads(scalars(x), m),
    "weights": lambda x, m, h: gradkit.value_and_grads(scalars(x), m, weights={"a": 0.5, "b": 2.0}),
    "weights=function": lambda x, m, h: gradkit.value_and_grads(scalars(x), m, weights=of_weights),
    "create_graph": lambda x, m, h: gradkit.value_and_grads(scalars(x), m, create_graph=True),
    "per_loss_grads": lambda x, m, h: gradkit.per_loss_grads(scalars(x), m),
    "per_loss_grads, batched": lambda x, m, h: gradkit.per_loss_grads(
        elements(x), m, strategy="batched"
    ),
    "simultaneous_grads": lambda x, m, h: gradkit.simultaneous_grads(
        scalars(x), {"a": m[0], "b": m[3]}
    ),
    "vjp": lambda x, m, h: gradkit.vjp(h, m[0], torch.ones_like(h)),
    "backward_": lambda x, m, h: gradkit.backward_(scalars(x), m),
    "gram": lambda x, m, h: gradkit.gram(scalars(x), m),
    "gram, chunk_size=1": lambda x, m, h: gradkit.gram(scalars(x), m, chunk_size=1),
    "per_loss_norms": lambda x, m, h: gradkit.per_loss_norms(scalars(x), m),
    "per_sample_norms": lambda x, m, h: gradkit.per_sample_norms(elements(x), m),
    "clipped_sum": lambda x, m, h: gradkit.clipped_sum(elements(x), m, max_norm=1.0),
    "value_and_reduced_grads": lambda x, m, h: gradkit.value_and_reduced_grads(
        scalars(x), m, torch.clone
    ),
    "safe_retain": retained,
    "Accumulator": lambda x, m, h: accumulated(x, m),
}


def model_on(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).to(device)


def forward(model: nn.Module, x: Tensor) -> tuple[Losses, Tensor]:
    hidden = model[1](model[0](x))
    out = model[3](model[2](hidden))
    return {"a": out.square().mean(), "b": out.sin().sum(), "each": out.square().mean(1)}, hidden


class Streams:
    """Three streams of a device; the first is the current one."""

    def __init__(self, device: torch.device) -> None:
        self.every = [torch.accelerator.current_stream(), *(torch.Stream(device) for _ in "12")]
        self.meet()

    def on(self, number: int, *, after: int | None = None) -> AbstractContextManager[object]:
        """Enter a stream, which has waited for another one."""
        if after not in (None, number):
            self.every[number].wait_stream(self.every[after])
        return self.every[number] if number else nullcontext()

    def meet(self) -> None:
        """Have the first stream wait for all others, and those for it."""
        for other in self.every[1:]:
            self.every[0].wait_stream(other)
        for other in self.every[1:]:
            other.wait_stream(self.every[0])


# The streams on which the forward pass and the call run.
PLACES = {"all there": (1, 1), "forward there": (1, 0), "call there": (0, 1), "apart": (1, 2)}
FOLLOWS = ("use", "the forward pass's stream goes on", "use, and that goes on")


def turns(device: torch.device, call: str, place: str, follows: str) -> Iterator[None]:
    """Take gradients twice: results are used where the call was, and freed."""
    torch.manual_seed(0)
    model, x = model_on(device), torch.randn(5, 8, device=device)
    streams, (there, here) = Streams(device), PLACES[place]
    for _ in range(2):
        with streams.on(there):
            losses, hidden = forward(model, x)
        with streams.on(here, after=there):
            results = CALLS[call](losses, model, hidden)
            if "use" in follows:
                for leaf in pytree.tensors(results):
                    _ = leaf * 2
            del results
        del losses, hidden
        if "goes on" in follows:
            with streams.on(there):
                for _ in range(3):
                    _ = x * 2
        streams.meet()
        yield


@pytest.mark.parametrize("follows", FOLLOWS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS)
def test_no_call_has_a_hazard(device: torch.device, call: str, place: str, follows: str) -> None:
    with emulation.hazards() as seen:
        for _ in turns(device, call, place, follows):
            pass
    assert not seen, "\n".join(seen[:5])
