"""What ranks must have in common about one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class GradSpec(NamedTuple):
    """The kind of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    graph: bool  # it carries one, which is to go on through the reduction
    layout: torch.layout
    dense_dim: int  # the number of dense dimensions of a sparse gradient

    @staticmethod
    def of(grad: Tensor | None, *, differentiable: bool = False) -> GradSpec | None:
        """Return the spec of a gradient, None for None."""
        if grad is None:
            return None
        dense_dim = grad.dense_dim() if grad.layout != torch.strided else 0
        graph = differentiable and grad.requires_grad
        shape = tuple(grad.shape)
        return GradSpec(shape, grad.dtype, grad.device.type, graph, grad.layout, dense_dim)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the dense gradient."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def adds_to(self, other: GradSpec) -> bool:
        """Return whether gradients can be summed: they may differ in layout, sparse or dense."""
        return self[:4] == other[:4]

    def as_dense(self) -> GradSpec:
        """Return the spec of the dense gradient."""
        return self._replace(layout=torch.strided, dense_dim=0)

    def local(self, grad: Tensor | None) -> Tensor:
        """Return a rank's gradient in this layout; zeros for None."""
        if grad is None:
            return self._zeros()
        if self.layout == torch.strided:
            return grad.to_dense() if grad.is_sparse else grad
        return grad if grad.is_sparse else grad.to_sparse(len(self.shape) - self.dense_dim)

    def _zeros(self) -> Tensor:
        # On "cuda" without an index: the device that torch.cuda.set_device has chosen.
        if self.layout == torch.strided:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        split = len(self.shape) - self.dense_dim
        indices = torch.empty(split, 0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *self.shape[split:], dtype=self.dtype, device=self.device)
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        graph = ", with a graph" if self.graph else ""
        return f"a {kind} tensor of shape {self.shape} on {self.device}{graph}"


# Of each gradient over all ranks; None if no rank has one.
Specs: TypeAlias = Sequence[GradSpec | None]
