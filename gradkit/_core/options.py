"""The values that options take."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from numbers import Real
from sys import float_info
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from gradkit.errors import OptionError, describe, message

Unused: TypeAlias = Literal["none", "zeros", "error"]
# The values of `unused` under which every trainable parameter has a gradient.
Filled: TypeAlias = Literal["zeros", "error"]
Strategy: TypeAlias = Literal["sequential", "batched", "auto"]

UNUSED: tuple[Unused, ...] = ("none", "zeros", "error")
STRATEGIES: tuple[Strategy, ...] = ("sequential", "batched", "auto")


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise if an option is none of the values that it takes, by equality and by type."""
    for one in allowed:
        if type(value) is type(one) and value == one:
            return
    values = " or ".join(map(repr, allowed))
    texts = [one for one in allowed if isinstance(one, str)]
    meant = get_close_matches(value, texts, 1) if isinstance(value, str) else []
    raise OptionError(message(name, values, repr(value), f"{name}={[*meant, allowed[0]][0]!r}"))


def check_bool(name: str, value: object) -> None:
    """Raise if an option is not a bool."""
    if value is not True and value is not False:
        check_option(name, value, (False, True))


def check_optional_bool(name: str, value: object) -> None:
    """Raise if an option is neither a bool nor None."""
    if value is not None:
        check_option(name, value, (None, False, True))


def check_function(value: object, name: str = "fn") -> None:
    """Raise if what is to be differentiated is not a function."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        expected, fix = f"a function, such as an instance of {value.__name__}", "make one"
        raise OptionError(message(name, expected, f"the class {value.__name__}", fix))
    if not callable(value):
        fix = "pass a function; for losses that exist: gradkit.value_and_grads(losses, params)"
        raise OptionError(message(name, "a function", describe(value), fix))


_WEIGHTING, _AGGREGATOR = "from [K, K] to K weights", "from [K, n] to a gradient [n]"


def check_weighting(weights: object) -> None:
    """Raise if what is to weigh losses by their Gramian is an aggregator of TorchJD, or a class."""
    fix = "gradkit.combine(gradkit.per_loss_grads(losses, params), aggregator)"
    _check_function_of_losses("weights", weights, "Aggregator", _WEIGHTING, _AGGREGATOR, fix)


def check_aggregator(aggregator: object) -> None:
    """Raise if what is to make one gradient of several is a weighting of TorchJD, or a class."""
    fix = "gradkit.value_and_grads(losses, params, weights=weighting), or an aggregator: UPGrad()"
    _check_function_of_losses("aggregator", aggregator, "Weighting", _AGGREGATOR, _WEIGHTING, fix)


def _check_function_of_losses(
    name: str, value: object, refused: str, expected: str, got: str, fix: str
) -> None:
    if isinstance(value, type):
        got, fix = f"the class {value.__name__}", f"pass an instance: {value.__name__}()"
    elif any(b.__name__ == refused and b.__module__[:8] == "torchjd." for b in type(value).__mro__):
        got = f"{describe(value)}, {got}"  # which would be right for no sizes, and run for some
    else:
        return
    raise OptionError(message(name, f"a function {expected}", got, fix))


def check_pass_options(unused: object, create_graph: object, retain_graph: object) -> None:
    """Raise if an option that all calls with engine passes have has no such value."""
    check_option("unused", unused, UNUSED)
    check_bool("create_graph", create_graph)
    check_optional_bool("retain_graph", retain_graph)


def check_batching(strategy: object, chunk_size: object) -> None:
    """Raise if an option of per-loss gradients has no such value."""
    check_option("strategy", strategy, STRATEGIES)
    check_chunk_size(chunk_size)


def check_chunk_size(value: object, name: str = "chunk_size") -> None:
    """Raise if a chunk size is neither a positive int nor None, which is everything at once."""
    if value is not None and not is_positive_int(value):
        fix = f"{name}=None, for all at once; {name}=1 takes the least memory"
        raise OptionError(message(name, "a positive int or None", repr(value), fix))


def is_number(value: object) -> bool:
    """Return whether a value is a real number that fits in a float; a bool is no number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -float_info.max <= value <= float_info.max
    return isinstance(value, float | Real)  # a float at once: Real is an abstract class


def is_positive_int(value: object) -> bool:
    """Return whether a value is an int of at least 1; a bool is no int."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_real_number(value: object) -> bool:
    """Return whether this is a real number, or a real tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value)


def number_for_torch(value: Any) -> float | Tensor:
    """Return a number as one that torch takes: not an int of more than 64 bits, or a fraction."""
    is_taken = isinstance(value, Tensor) or (isinstance(value, int) and abs(value) < 1 << 63)
    result: float | Tensor = value if is_taken else float(value)
    return result


def check_number(name: str, value: Any, fix: str, *, nonnegative: bool = False) -> Any:
    """Return a number for torch; raise if it is none, and no tensor of one, whose sign is free."""
    if not is_real_number(value):
        kind = "a real number, or a real tensor of one element"
        raise OptionError(message(name, kind, describe(value), fix))
    if nonnegative and not isinstance(value, Tensor) and not value >= 0:
        raise OptionError(message(name, "a number of at least 0", repr(value), fix))
    return number_for_torch(value)
