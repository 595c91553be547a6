"""torch's private names for modules. Run on torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.utils import parametrize


def lists_as_torch(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class list their parameters as `torch.nn.Module` does."""
    # A scripted module keeps its parameters elsewhere.
    return torch.jit.ScriptModule not in kind.__mro__ and (
        kind.named_parameters is nn.Module.named_parameters
        and kind.named_modules is nn.Module.named_modules
        and kind._named_members is nn.Module._named_members
    )


# None of these reduces or shards gradients.
OF_TORCH_NN = frozenset(
    each
    for each in vars(nn.modules).values()
    if isinstance(each, type) and issubclass(each, nn.Module)
)


def own_parametrized_values() -> AbstractContextManager[None]:
    """Return what keeps a call's computed weights apart, inside of `parametrize.cached()`."""
    # The cache goes by module and name, whatever the tensors are that it was computed from.
    return _own_cache() if parametrize._cache_enabled else nullcontext()


@contextmanager
def _own_cache() -> Iterator[None]:
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before
