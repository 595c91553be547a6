"""The states of the random number generators.

Apart, as its names are short: a caller says `rng.states()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

States: TypeAlias = list[tuple[torch.device | Generator, Tensor]]
_CPU = torch.device("cpu")


def states() -> States:
    """Return the states of the default generators: the CPU's, and those of every accelerator."""
    # Every generator counts: a function may draw on a device that none of its arguments is on.
    every, kind = [_CPU], torch.accelerator.current_accelerator()
    if kind is None:
        return [(_CPU, torch.get_rng_state())]
    if hasattr(module := _module(kind), "get_rng_state"):
        every += [torch.device(kind.type, index) for index in range(module.device_count())]
    return states_of(every)


def _module(kind: torch.device) -> Any:
    """Return torch's module for a kind of accelerator; None before its first use."""
    module = torch.get_device_module(kind)
    return module if getattr(module, "is_initialized", module.is_available)() else None


def states_of(generators: Iterable[torch.device | Generator]) -> States:
    """Return the states of some generators, or of the default ones of devices."""
    return [(one, _state(one)) for one in generators]


def generators(captured: Iterable[object]) -> Iterator[Generator]:
    """Yield the generators among some objects, and those that modules among them have."""
    for one in captured:
        # isinstance(value, Generator) calls a method of torch's, for each attribute.
        if type(one) is Generator:
            yield one
        elif isinstance(one, nn.Module):
            values = chain.from_iterable(vars(part).values() for part in one.modules())
            yield from (value for value in values if type(value) is Generator)


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
            torch.get_device_module(one).set_rng_state(state, one)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured here, which records what runs, and no state."""
    kind = torch.accelerator.current_accelerator()
    return kind is not None and getattr(_module(kind), "is_current_stream_capturing", bool)()


def _state(one: torch.device | Generator) -> Tensor:
    if isinstance(one, Generator):
        return one.get_state()
    if one.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(one).get_rng_state(one)
    return state
