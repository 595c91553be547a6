"""Whether trees of gradients are equal up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from gradkit._compat.dtensor import full_tensor
from gradkit._core.options import check_bool
from gradkit._core.pytree import PyTree
from gradkit.tree._columns import call_on_row, columns
from gradkit.tree._numbers import check_nonnegative


def allclose(
    a: PyTree, b: PyTree, *, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return whether two trees are equal up to rounding; None is close to zeros.

    Example:
        >>> import torch, gradkit
        >>> gradkit.tree.allclose({"w": torch.zeros(2)}, {"w": None})
        True

    Args:
        a: A tree of tensors or None.
        b: A tree of the same structure.
        rtol: The relative tolerance, of `b`.
        atol: The absolute tolerance.
        equal_nan: Whether NaN equals NaN.

    Returns:
        True if every leaf is.

    Raises:
        LeafTypeError: A leaf is not a tensor.
        OptionError: A tolerance is not a number of at least 0, or `equal_nan` is not a bool.
        StructureError: The trees do not match.

    Source:
        `torch.allclose`.
    """
    check_nonnegative("rtol", rtol, "rtol=1e-05")
    check_nonnegative("atol", atol, "atol=1e-08")
    check_bool("equal_nan", equal_nan)

    def close(x: Tensor, y: Tensor) -> bool:
        x, y = full_tensor(x).to_dense(), full_tensor(y).to_dense()
        return torch.allclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan)

    leaves, _ = columns(a=a, b=b)
    # All leaves, also after one that is not close: gathering DTensors is a collective.
    results = [call_on_row(close, row) for row in zip(*leaves, strict=True)]
    return all(result is not False for result in results)
