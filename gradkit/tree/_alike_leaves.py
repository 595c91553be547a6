"""Leaves that one kernel takes together, or one loop without a look at each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gradkit._compat.transforms import in_dual_level, transforms
from gradkit._core.leaf_arithmetic import ARITHMETIC_DTYPES
from gradkit._core.ownership import PLAIN_TYPES

_layout, _is_nested, _requires_grad, _dtype, _device = map(
    attrgetter, ("layout", "is_nested", "requires_grad", "dtype", "device")
)
_DENSE = {torch.strided}
_FOREACH = ("cpu", "cuda")  # devices whose kernels torch runs for a list of tensors


def are_dense(leaves: Collection[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether all leaves, of which there are some, are plain dense tensors."""
    return (
        not torch.compiler.is_compiling()  # which reads no attributes of many at a time
        and PLAIN_TYPES.issuperset(map(type, leaves))
        and set(map(_layout, leaves)) == _DENSE
        and not any(map(_is_nested, leaves))
    )


def are_dense_constants(leaves: Collection[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether they are that, without a graph or tangents, and outside of transforms."""
    return (
        are_dense(leaves)
        and not any(map(_requires_grad, leaves))
        and not transforms()
        and not in_dual_level()
    )


def are_of_one_kind(
    leaves: Iterable[Tensor], dtypes: Collection[torch.dtype] = ARITHMETIC_DTYPES
) -> bool:
    """Return whether tensors are of one of these dtypes, on one device with kernels for lists."""
    own_dtypes, devices = set(map(_dtype, leaves)), set(map(_device, leaves))
    return (
        len(own_dtypes) == len(devices) == 1
        and own_dtypes.issubset(dtypes)
        and devices.pop().type in _FOREACH
    )


def take_one_kernel(leaves: Sequence[Any]) -> TypeGuard[list[Tensor]]:
    """Return whether one kernel takes all leaves: dense constants of one kind."""
    return are_dense_constants(leaves) and are_of_one_kind(leaves)
