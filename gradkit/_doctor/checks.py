"""Checks: a value beside the expected one; and the findings, which consist of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, TypeAlias

import torch
from torch import Tensor

# The types of JSON. Tensors become nested lists, and numbers that are not finite strings.
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


@dataclass(frozen=True)
class Check:
    """A value and the expected one, as copies without tensors, and whether they are equal."""

    what: str
    got: JsonValue
    expected: JsonValue
    equal: bool


@dataclass(frozen=True)
class Finding:
    """The checks of one confusion on one device, or the error that it raised."""

    device: str
    number: int
    title: str
    torch: list[Check] = field(default_factory=list)
    gradkit: list[Check] = field(default_factory=list)
    error: str | None = None

    def in_torch(self, what: str, got: Any, expected: Any) -> None:
        """Check what torch did."""
        self.torch.append(check(what, got, expected))

    def in_gradkit(self, what: str, got: Any, expected: Any) -> None:
        """Check what gradkit returned."""
        self.gradkit.append(check(what, got, expected))

    @property
    def torch_equal(self) -> bool:
        """Whether torch did what is expected."""
        return self.error is None and all(check.equal for check in self.torch)

    @property
    def gradkit_equal(self) -> bool:
        """Whether gradkit returned the right values."""
        return self.error is None and all(check.equal for check in self.gradkit)

    @property
    def equal(self) -> bool:
        """Whether both did."""
        return self.torch_equal and self.gradkit_equal


def leaf(device: torch.device, *values: float) -> Tensor:
    """Return a leaf tensor that requires grad."""
    return torch.tensor(values, dtype=torch.float32, device=device, requires_grad=True)


def check(what: str, got: Any, expected: Any) -> Check:
    """Compare a value with the expected one; tensors bit by bit."""
    return Check(what, json_value(got), json_value(expected), _same(got, expected))


def error_of(call: Callable[[], object], text: str) -> str:
    """Return the class of the error that a call raises, with `text` if its message contains it."""
    try:
        call()
    except Exception as error:
        shown = text if text in str(error) else first_line(error)
        return f"{type(error).__name__}: {shown}"
    return "no error"


def first_line(error: Exception) -> str:
    """Return the first line of an error message, shortened."""
    return shorten(str(error).split("\n", 1)[0], width=160, placeholder=" ...")


def json_value(value: Any) -> JsonValue:
    """Return a value in the types of JSON."""
    if isinstance(value, Tensor):
        return json_value(value.detach().tolist())
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def text(value: JsonValue) -> str:
    """Return a value as short text."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {text(item)}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_same(got[k], expected[k]) for k in expected)
    return type(got) is type(expected) and bool(got == expected)
