"""A small bucket whose vector is kept between the calls of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradkit.distributed._reduction import Bucket


class KeptBucket:
    """A vector of the entries of dense gradients, and of a zero after them."""

    # Two kernels for the list copy to the parts of the vector and back. To make these parts takes
    # longer than both: as long as a third of the reduction of 200 gradients.

    def __init__(self, bucket: Bucket, like: Tensor) -> None:
        shapes = [torch.Size(spec.shape) for _, spec in bucket]
        sizes = [shape.numel() for shape in shapes]
        self._indices = [index for index, _ in bucket]
        self.flat = like.new_empty(sum(sizes) + 1)
        *parts, self._zero = torch.split(self.flat, [*sizes, 1])
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def fill(self, grads: Sequence[Any]) -> None:
        """Copy the bucket's gradients, out of all, to the vector."""
        torch._foreach_copy_(self._parts, self._chosen(grads))
        self._zero.zero_()

    def write(self, grads: Sequence[Any]) -> None:
        """Copy the vector to the bucket's gradients."""
        torch._foreach_copy_(self._chosen(grads), self._parts)

    def _chosen(self, grads: Sequence[Any]) -> list[Tensor]:
        return [grads[index] for index in self._indices]
