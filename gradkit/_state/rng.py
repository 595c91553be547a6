"""The states of the random number generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

States: TypeAlias = list[tuple[torch.device, Tensor]]


def states(tensors: Iterable[object]) -> States:
    """Return the states of the CPU generator and of the CUDA generators of some tensors."""
    devices = {x.device for x in tensors if isinstance(x, Tensor) and x.device.type == "cuda"}
    return [
        (torch.device("cpu"), torch.get_rng_state()),
        *((device, torch.cuda.get_rng_state(device)) for device in devices),
    ]


def current(saved: States) -> States:
    """Return the states that the same generators have now."""
    return states([torch.empty(0, device=device) for device, _ in saved if device.type != "cpu"])


def differ(saved: States) -> bool:
    """Return whether one of the generators is in another state now."""
    pairs = zip(saved, current(saved), strict=True)
    return any(not torch.equal(before, now) for (_, before), (_, now) in pairs)


def restore(saved: States) -> None:
    """Put the generators into these states."""
    for device, state in saved:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
