"""One observation: what came out, beside what should have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, TypeAlias

import torch
from torch import Tensor

# What JSON has: tensors are nested lists in it, and what is not finite is a string.
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

# What torch says of a graph that a pass has freed.
FREED = "Trying to backward through the graph a second time"


@dataclass(frozen=True)
class Check:
    """What was looked at, what came out, what should have, and whether they are equal.

    It holds no tensors, so that nothing that happens later can change it.
    """

    what: str
    got: Plain
    right: Plain
    equal: bool


@dataclass(frozen=True)
class Seen:
    """What torch did, and what gradkit gave."""

    torch: list[Check]
    gradkit: list[Check]


def leaf(device: torch.device, *values: float) -> Tensor:
    """Return a tensor to differentiate by."""
    return torch.tensor(values, dtype=torch.float32, device=device, requires_grad=True)


def check(what: str, got: Any, right: Any) -> Check:
    """Return the comparison of what came out with what should have, of tensors bit by bit."""
    return Check(what, plain(got), plain(right), _same(got, right))


def error_of(call: Callable[[], object], words: str) -> str:
    """Return the error that a call raises: its class, and these words of it if it says them."""
    try:
        call()
    except Exception as error:
        said = words if words in str(error) else first_line(error)
        return f"{type(error).__name__}: {said}"
    return "no error"


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its beginning."""
    return shorten(str(error).split("\n", 1)[0], width=160, placeholder=" ...")


def plain(value: Any) -> Plain:
    """Return a value as JSON would have it."""
    if isinstance(value, Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def text(value: Plain) -> str:
    """Return a value in as few characters as will do."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _same(got: Any, right: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(right, Tensor):
        return got.dtype == right.dtype and torch.equal(got, right)
    if isinstance(got, list | tuple) and isinstance(right, list | tuple):
        return len(got) == len(right) and all(map(_same, got, right))
    if isinstance(got, dict) and isinstance(right, dict):
        return got.keys() == right.keys() and all(_same(got[key], right[key]) for key in right)
    return type(got) is type(right) and bool(got == right)
