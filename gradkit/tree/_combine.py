"""One gradient made of the gradients of several losses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradkit._core.pytree import PyTree
from gradkit.errors import StructureError, describe, message
from gradkit.tree._matrix import to_matrix
from gradkit.tree._weighted_sum import weighted_sum


def combine(
    per_loss: PyTree,
    aggregator: Callable[[Tensor], Tensor] | PyTree,
    *,
    losses: PyTree | None = None,
) -> PyTree:
    """Return one gradient made of the gradients of several losses.

    Example:
        >>> import torch, gradkit
        >>> per_loss = {"a": {"w": torch.ones(2)}, "b": {"w": torch.tensor([3.0, 0.0])}}
        >>> gradkit.combine(per_loss, lambda matrix: matrix.mean(0))
        {'w': tensor([2.0000, 0.5000])}

    Args:
        per_loss: K losses (its top level), each a tree of gradients of one structure.
        aggregator: A function from the matrix `[K, n]` of `to_matrix` to a vector `[n]`, such as
            an aggregator of TorchJD. Or weights, as in `weighted_sum`, which builds no matrix.
        losses: As in `to_matrix`.

    Returns:
        A tree like the gradients of one loss, in their dtypes; None where every loss has None.

    Raises:
        LeafTypeError: A gradient is not a tensor, or a weight is not a real number.
        StructureError: There are no losses, trees do not match, or the aggregator returns another
            shape than `[n]`.

    Source:
        Aggregators: Quinton and Rey 2024, "Jacobian Descent for Multi-Objective Optimization",
        https://arxiv.org/abs/2406.16232
    """
    if not callable(aggregator):
        return weighted_sum(per_loss, aggregator, losses=losses)
    matrix, unravel = to_matrix(per_loss, losses=losses)
    vector = aggregator(matrix)
    if not isinstance(vector, Tensor) or vector.shape != matrix.shape[1:]:
        expected = f"a vector of shape {tuple(matrix.shape[1:])}"
        got = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else describe(vector)
        advice = "reduce the matrix over its rows: matrix.mean(0)"
        raise StructureError(message("the aggregator's result", expected, got, advice))
    return unravel(vector)
