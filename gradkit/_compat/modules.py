"""torch's private names for modules. Run on torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrize

from gradkit._compat.undoing import undone


def lists_as_torch(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class list their parameters as `torch.nn.Module` does."""
    return (
        kind.named_parameters is _NAMED_PARAMETERS
        and kind.named_modules is _NAMED_MODULES
        and kind._named_members is _NAMED_MEMBERS
        # A scripted module keeps its parameters elsewhere.
        and (kind in OF_TORCH_NN or torch.jit.ScriptModule not in kind.__mro__)
    )


_NAMED_PARAMETERS, _NAMED_MODULES = nn.Module.named_parameters, nn.Module.named_modules
_NAMED_MEMBERS = nn.Module._named_members
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
    with undone(partial(setattr, parametrize, "_cache", parametrize._cache)):
        parametrize._cache = {}
        yield
