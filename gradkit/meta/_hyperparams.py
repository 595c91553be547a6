"""Hyper-parameters, read into numbers and lists with one value for each leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from gradkit._core import pytree
from gradkit._core.options import check_bool
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


def read_hyperparams(
    hyper: Mapping[str, Hyper],
    flags: Collection[str],
    leaves: Sequence[Any],
    spec: Structure,
    moving: Collection[int],
) -> dict[str, Any]:
    """Return by name a flag, a number, or a list with a number or a tensor for each leaf."""
    read = partial(_read, leaves=leaves, spec=spec, moving=moving)
    settings: dict[str, Any] = {}
    for name, value in hyper.items():
        if name in flags:
            check_bool(name, value)
            settings[name] = value
        elif name == "betas":
            _check_pair(value)
            settings[name] = tuple(read(f"betas[{i}]", beta) for i, beta in enumerate(value))
        else:
            settings[name] = read(name, value)
    return settings


def _check_pair(betas: object) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise OptionError(message("betas", "a pair", describe(betas), "betas=(0.9, 0.999)"))


def _read(
    name: str, value: Hyper, leaves: Sequence[Any], spec: Structure, moving: Collection[int]
) -> float | list[Any]:
    if _is_number(value):
        return float(value)
    values = pytree.broadcast_prefix(value, name, pytree.unflatten(spec, leaves), "params")
    for index, (leaf, number) in enumerate(zip(leaves, values, strict=True)):
        if leaf is not None:
            where = partial(pytree.path, spec, index, f"{name} of params")
            _check_number(number, name, where)
            if index in moving:
                _check_shape(number, leaf, where)
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not _is_bool(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _check_number(value: object, name: str, where: Callable[[], str]) -> None:
    if not isinstance(value, Tensor) and not _is_number(value):
        raise LeafTypeError(
            message(
                where(),
                "a number or a tensor",
                describe(value),
                f"{name}=0.1, or a tree like params",
            )
        )


def _check_shape(value: float | Tensor, leaf: Tensor, where: Callable[[], str]) -> None:
    if isinstance(value, Tensor) and value.numel() != 1 and value.shape != leaf.shape:
        raise StructureError(
            message(
                where(),
                f"one number, or a tensor of shape {tuple(leaf.shape)}",
                describe(value),
                "torch.full_like(leaf, 0.1)",
            )
        )


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
