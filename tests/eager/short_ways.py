"""What the tests of the short ways share: a process that looks new, and which way a call went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

import gradkit
from gradkit import eager
from gradkit._autograd import plain_passes
from gradkit._core import user_code


@contextmanager
def noting_short_calls(name: str) -> Iterator[list[bool]]:
    """Yield a list that gets, for each call that is tried the short way, whether it was taken."""
    taken: list[bool] = []
    short = getattr(eager, name)

    def noted(*args: Any) -> Any:
        result = short(*args)
        taken.append(result is not None)
        return result

    with patch.object(eager, name, noted):
        yield taken


def no_hook_yet() -> Any:
    """Let the process look as if no hook had been registered before."""
    return patch.object(user_code._own_hooks, "count", RemovableHandle.next_id)


@contextmanager
def plain_process(*, functions: bool = False) -> Iterator[None]:
    """Let the process look as if no other test had left something alive, but for Functions."""

    def alive() -> user_code.FunctionsAlive:
        users = functions and user_code.functions_alive().users
        return user_code.FunctionsAlive(refused=False, users=users)

    with (
        patch.object(plain_passes, "functions_alive", alive),
        patch.object(plain_passes, "functions_alive", alive),
        patch.object(plain_passes, "any_fully_sharded", lambda: False),
        patch.object(plain_passes, "recomputed_tensor_sources", {}),
    ):
        yield


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class and the text of its error."""
    try:
        return call()
    except gradkit.GradkitError as error:
        return type(error), str(error)


def with_others(leaves: list[Tensor], places: set[int]) -> list[Tensor | None]:
    """Return leaves among which some are frozen, or None."""
    params: list[Tensor | None] = list(leaves)
    for place in sorted(places):
        params.insert(place, None if place % 2 else torch.ones(2, device=leaves[0].device))
    return params
