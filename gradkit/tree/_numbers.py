"""Numbers among the arguments of functions of trees."""

from __future__ import annotations

from numbers import Real

from torch import Tensor

from gradkit.errors import OptionError, describe, message


def is_real_number(value: object) -> bool:
    """Return whether this is a real number, or a real tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def check_number(name: str, value: object, advice: str) -> None:
    """Raise if an option is not a real number, or a real tensor of one element; a bool is none."""
    if isinstance(value, bool) or not is_real_number(value):
        kind = "a real number, or a real tensor of one element"
        raise OptionError(message(name, kind, describe(value), advice))


def check_nonnegative(name: str, value: object, advice: str) -> None:
    """Raise if an option is not a number of at least 0; of a tensor the value is not read."""
    check_number(name, value, advice)
    if not isinstance(value, Tensor) and not value >= 0:  # type: ignore[operator]
        raise OptionError(message(name, "a number of at least 0", repr(value), advice))
