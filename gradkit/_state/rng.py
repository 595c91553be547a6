"""The states of the random number generators.

Apart, as its names are short: a caller says `rng.states(tensors)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

States: TypeAlias = list[tuple[torch.device | Generator, Tensor]]


def states(tensors: Iterable[object]) -> States:
    """Return the states of the CPU generator and of the CUDA generators of some tensors."""
    devices = {x.device for x in tensors if isinstance(x, Tensor) and x.device.type == "cuda"}
    return states_of([torch.device("cpu"), *devices])


def states_of(generators: Iterable[torch.device | Generator]) -> States:
    """Return the states of some generators, or of the default ones of devices."""
    return [(one, _state(one)) for one in generators]


def generators(captured: Iterable[object]) -> Iterator[Generator]:
    """Yield the generators among some objects, and those that modules among them have."""
    for one in captured:
        if isinstance(one, Generator):
            yield one
        elif isinstance(one, nn.Module):
            values = chain.from_iterable(vars(part).values() for part in one.modules())
            yield from (value for value in values if isinstance(value, Generator))


def current(saved: States) -> States:
    """Return the states that the same generators have now."""
    return states_of(one for one, _ in saved)


def differ(saved: States) -> bool:
    """Return whether one of the generators is in another state now."""
    pairs = zip(saved, current(saved), strict=True)
    return any(not torch.equal(before, now) for (_, before), (_, now) in pairs)


def restore(saved: States) -> None:
    """Put the generators into these states."""
    for one, state in saved:
        if isinstance(one, Generator):
            one.set_state(state)
        elif one.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, one)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured here, which records what runs, and no state."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _state(one: torch.device | Generator) -> Tensor:
    if isinstance(one, Generator):
        return one.get_state()
    return torch.get_rng_state() if one.type == "cpu" else torch.cuda.get_rng_state(one)
