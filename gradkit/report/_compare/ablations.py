"""Ablations: what a run leaves out, to see whether it is why two methods differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradkit._state.dot_grad import copy_into_grads

STALE, HOOKS, GRAD_DTYPE, DROPOUT, CACHE = "stale", "hooks", "grad_dtype", "dropout", "cache"

Ablation: TypeAlias = frozenset[str]
NONE: Ablation = frozenset()

# The attributes of torch's modules that hold the probability of dropout.
_DROPOUT_RATES: dict[str, tuple[type, ...]] = {
    "p": (
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    ),
    "dropout": (nn.MultiheadAttention, nn.RNNBase),
}


def prepare_grads(
    params: Sequence[Tensor], stale: Sequence[Tensor | None], ablation: Ablation
) -> None:
    """Give params whose `.grad` is None their stale `.grad`, or leave it or `grad_dtype` out."""
    if GRAD_DTYPE in ablation:
        for param in params:
            param.grad_dtype = param.dtype
    elif STALE not in ablation:
        copy_into_grads(params, stale)


def drop_nothing(modules: Iterable[nn.Module]) -> None:
    """Set the probability of dropout to 0 in all of torch's modules."""
    for part in (part for module in modules for part in module.modules()):
        for name, kinds in _DROPOUT_RATES.items():
            if isinstance(part, kinds):
                setattr(part, name, 0.0)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Have autocast cast a parameter for every use."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def without_hooks(tables: Iterable[Any]) -> Iterator[None]:
    """Empty tables of hooks, which torch reads in each pass, and fill them afterwards."""
    before = [(table, dict(table)) for table in tables if table]
    try:
        for table, _ in before:
            table.clear()
        yield
    finally:
        for table, hooks in before:
            table.update(hooks)
