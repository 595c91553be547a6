"""Dense tensors as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch._utils
from torch import Tensor


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector of the entries of dense tensors of one dtype. Run on torch 2.13."""
    flat = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return cast("Tensor", flat)
