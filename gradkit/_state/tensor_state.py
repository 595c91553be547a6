"""What tensors are: their values, dtypes, and whether they require grad; to be put back."""

# Apart, as modules and whole snapshots are put back with it.

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradkit._compat.undoing import INSIDE

_KIND = ("dtype", "device", "shape")


class TensorState:
    """The values of some tensors, their memory, and whether they require grad."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [
            (x, x.data, _version(x), x.detach().clone(), x.is_leaf, x.requires_grad)
            for x in tensors
        ]

    def restore(self, *, by_version: bool = False) -> None:
        """Put back what has changed; `by_version`, as far as torch has counted it."""
        for tensor, data, version, numbers, was_leaf, requires_grad in self._saved:
            if any(getattr(tensor, name) != getattr(data, name) for name in _KIND):
                tensor.data = data  # a module was moved or cast
            if _version(tensor) != version or not (by_version or _is_same(tensor, numbers)):
                with torch.inference_mode(), INSIDE:  # in which its own can be written on
                    (tensor if tensor.is_inference() else data).copy_(numbers)
            if was_leaf and not (tensor.is_leaf or tensor._is_view()):
                tensor.detach_()  # what was written on it has a graph
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no count


def _is_same(tensor: Tensor, numbers: Tensor) -> bool:
    is_comparable = tensor.layout == torch.strided and not tensor.is_meta
    return not is_comparable or torch.equal(tensor.detach(), numbers)
