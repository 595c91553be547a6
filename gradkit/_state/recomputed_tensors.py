"""Tensors that a graph does not keep for its backward pass, which computes them again.

A parameter that is gathered for one layer would otherwise stay in memory until the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gradkit._compat.autograd import storage_key
from gradkit._compat.transforms import default_hooks, differentiated
from gradkit._compat.undoing import INSIDE
from gradkit.errors import UnsupportedGraphError, message

# Computes a tensor again; raises if it would be another one by now.
Recompute = Callable[[], Tensor]


# The ids of what makes such tensors: while one exists, passes with create_graph look for them.
recomputed_tensor_sources: set[int] = set()
# Tensors are known by storage: a view is saved as part of it. The lives of Python's own objects
# differ between processes, which must recompute the same. A weak reference keeps the address.
_recomputed: dict[int, tuple[StorageWeakRef, torch.dtype, Recompute]] = {}


def register_recompute(tensor: Tensor, recompute: Recompute) -> None:
    """Let `recompute` stand for a tensor, which no one has saved yet, in graphs."""
    for key, (storage, *_) in list(_recomputed.items()):
        if storage.expired():  # type: ignore[no-untyped-call]
            del _recomputed[key]
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    _recomputed[storage_key(tensor)] = reference, tensor.dtype, recompute


def is_recomputed(tensor: Tensor) -> bool:
    """Return whether a tensor is one that `register_recompute` got, or a view of one."""
    return bool(_recomputed) and _recompute_of(tensor) is not None


def recompute_hooks() -> AbstractContextManager[Any]:
    """Let graphs that are recorded in the block save `recompute` in the place of its tensor."""
    if not recomputed_tensor_sources or differentiated() or torch.compiler.is_compiling():
        return nullcontext()  # torch.func's derivatives have no hooks for saved tensors
    return _saving_recomputes()


@contextmanager
def _saving_recomputes() -> Iterator[None]:
    pack, unpack = default_hooks() or (None, None)
    hooks = saved_tensors_hooks(lambda t: _pack(t, pack, unpack), lambda packed: packed())
    with hooks, INSIDE:
        yield


def _pack(tensor: Tensor, pack: Any, unpack: Any) -> Callable[[], Tensor]:
    """Return what gives a saved tensor in the backward pass."""
    if (recompute := _recompute_of(tensor)) is not None:
        shape = tensor.size(), tensor.stride(), tensor.storage_offset()
        return partial(_recomputed_view, recompute, *shape)
    if pack is not None:  # hooks are around ours, as a checkpoint's of the whole call
        return partial(unpack, pack(tensor))
    return partial(_unchanged, tensor, tensor._version)


def _recomputed_view(
    recompute: Recompute, size: torch.Size, stride: tuple[int, ...], offset: int | SymInt
) -> Tensor:
    with torch.no_grad(), INSIDE:
        whole = recompute()
        register_recompute(whole, recompute)
        # torch connects it with the graph of what was saved.
        return whole.as_strided(size, stride, offset)


OF_A_GRAPH = "the graph"  # what an error calls the place of a tensor that hooks have saved


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor; raise if it was written on, which torch does not see where hooks are."""
    if tensor._version != version:
        refuse_changed(f"a tensor of shape {tuple(tensor.shape)}", OF_A_GRAPH)
    return tensor


def refuse_changed(what: str, where: str) -> None:
    """Raise since a tensor that a backward pass needs is not what it was."""
    expected = f"{what} as it was in the forward pass"
    got = "one that was changed in place since, before the backward pass"
    fix = "take the gradients before the optimizer steps; change a copy, h + 1, and not h itself"
    raise UnsupportedGraphError(message(where, expected, got, fix))


def _recompute_of(tensor: Tensor) -> Recompute | None:
    if tensor.layout != torch.strided or not _recomputed:
        return None
    try:
        _, dtype, recompute = _recomputed[storage_key(tensor)]
    except (KeyError, NotImplementedError, RuntimeError):  # subclasses may have no storage
        return None
    return recompute if dtype == tensor.dtype else None
