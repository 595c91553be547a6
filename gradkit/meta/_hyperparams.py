"""Hyper-parameters, read into numbers and lists with one value for each leaf."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.pytree import Structure
from gradkit.errors import LeafTypeError, OptionError, StructureError, describe, message

# A number, a tensor of one element, or a tree like params with one of these for each leaf.
Hyper: TypeAlias = Any


def check_names(owner: str, hyper: Iterable[str], known: Iterable[str], fix: str) -> None:
    """Raise if a hyper-parameter is unknown."""
    names = list(known)
    for name in hyper:
        if name not in names:
            raise OptionError(
                f"{owner} has no hyperparameter {name!r}; it has {', '.join(names)}.\n"
                f"  What to do: {fix}"
            )


def read_hyperparam(
    name: str, value: Hyper, leaves: Sequence[Any], spec: Structure, moving: Collection[int]
) -> Any:
    """Return a number, or a list with a number or a tensor for each leaf; of `betas`, a pair."""
    if name == "betas":
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise OptionError(message("betas", "a pair", describe(value), "betas=(0.9, 0.999)"))
        named = zip(("betas[0]", "betas[1]"), value, strict=True)
        return tuple(read_hyperparam(one, beta, leaves, spec, moving) for one, beta in named)
    if _is_number(value):
        return float(value)
    values = pytree.broadcast_prefix(value, name, pytree.unflatten(spec, leaves), "params")
    for index, (leaf, number) in enumerate(zip(leaves, values, strict=True)):
        if leaf is None or _is_number(number):
            continue
        where = f"{name} of params"
        if not isinstance(number, Tensor):
            expected, fix = "a number or a tensor", f"{name}=0.1, or a tree like params"
            where = pytree.path(spec, index, where)
            raise LeafTypeError(message(where, expected, describe(number), fix))
        if index in moving and number.numel() != 1 and number.shape != leaf.shape:
            expected = f"one number, or a tensor of shape {tuple(leaf.shape)}"
            where, fix = pytree.path(spec, index, where), "torch.full_like(leaf, 0.1)"
            raise StructureError(message(where, expected, describe(number), fix))
    return values


def _is_number(value: object) -> bool:
    return value is not True and value is not False and isinstance(value, Real)


def select(value: Any, indices: Sequence[int]) -> Any:
    """Return a setting for some of the tensors."""
    if isinstance(value, tuple):
        return tuple(select(item, indices) for item in value)
    return [value[index] for index in indices] if isinstance(value, list) else value


def as_factor(value: Any) -> Any:
    """Return a setting whose tensors of one element do not change the shape of what they scale."""
    if isinstance(value, tuple):
        return tuple(map(as_factor, value))
    if not isinstance(value, list):
        return value
    return [x.reshape(()) if isinstance(x, Tensor) and x.numel() == 1 else x for x in value]
