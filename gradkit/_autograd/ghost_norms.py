"""Norms of the gradients of samples, from the cotangents of what the layers returned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradkit._autograd.jacobian_rows import ARRIVED, JacobianRows
from gradkit._autograd.sample_pass import SamplePass, grads_of, may_run
from gradkit._autograd.sample_rules import (
    Factors,
    NotProvedError,
    PerSampleGrads,
    SharedOperand,
    uses_shared_by_samples,
)
from gradkit._core.leaf_arithmetic import norms_of_rows
from gradkit.errors import GradkitError

# A sum of T products of norm a_t each has a squared norm S that is computed as the sum of T * T
# terms. The term of t and u is of size a_t * a_u at most, and its rounding error a few eps times
# that: the error of S is a few eps * A * A at most, where A is the sum of the a_t. Where S is more
# than these shares of A * A, the error of the norm is a few thousandths of it at most in float32,
# and mostly far less; in float64, where a norm may be differenced or compared, 1e-10. Positions
# whose gradients are orthogonal have S = A * A / T: they may be 8000, or 50,000.
_CANCELLED = {torch.float32: 1e-4, torch.float64: 2e-5}


class _SquaredNorms(NamedTuple):
    """For each sample, of one variable."""

    squares: Tensor
    # The square of the sum of the norms of what was added up, if by products; else there is no
    # such loss of digits.
    summed: Tensor | None = None


def ghost_norms(rows: JacobianRows, index: int) -> Tensor | None:
    """Return the norms for the elements of a loss, and keep the graph; None if not proved right."""
    loss, variables = rows.call.outputs[index], rows.params.variables
    below = rows.call.graph.below([index])
    if not may_run(rows.call, loss):
        return None
    try:
        uses = uses_shared_by_samples(loss, below, variables)
        squares = _squared_norms(rows, index, uses)
    except GradkitError:
        raise
    except (NotProvedError, RuntimeError, TypeError):
        # TypeError: Apple's GPUs have no float64. RuntimeError: such as out of memory; the batched
        # pass has its own ways.
        return None
    if squares is None:
        return None
    rows.note([ARRIVED if number in squares else None for number in range(len(variables))])
    return _total(rows, loss, [square.squares for square in squares.values()]).sqrt_()


def _squared_norms(
    rows: JacobianRows, index: int, uses: Sequence[SharedOperand]
) -> dict[int, _SquaredNorms] | None:
    """Return squared norms of which some digits are right; None if float64 has not enough."""
    variables = rows.params.variables
    if not _products_are_rounded(variables[0].device):
        squares = SamplePass(uses, variables, partial(_squares, dtype=None)).run(rows.call, index)
        if not _have_cancelled(rows, rows.call.outputs[index], squares):
            return squares
        if any(variable.dtype == torch.float64 for variable in variables):
            return None
    squares_of = partial(_squares, dtype=torch.float64)
    return SamplePass(uses, variables, squares_of).run(rows.call, index)


def _products_are_rounded(device: torch.device) -> bool:
    """Return whether the user lets products of float32 have fewer digits, such as TF32's."""
    # Convolutions have a switch of their own: a kernel's gradient has the digits of `.backward()`.
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def _have_cancelled(rows: JacobianRows, loss: Tensor, squares: dict[int, _SquaredNorms]) -> bool:
    """Return whether the norm of a sample is but a rounding error of what was added up."""
    summed = [square.summed for square in squares.values() if square.summed is not None]
    if not summed:
        return False
    total = _total(rows, loss, [square.squares for square in squares.values()])
    share = max(_CANCELLED[variable.dtype] for variable in rows.params.variables)
    least = share * _total(rows, loss, summed)
    return not total.is_meta and bool((total < least).any())  # the host has to wait for it


def _total(rows: JacobianRows, loss: Tensor, parts: Sequence[Tensor]) -> Tensor:
    total = rows.zeros(loss.numel())
    for part in parts:
        total += part.to(total)
    return total


def _squares(
    parts: list[PerSampleGrads], variable: Tensor, *, dtype: torch.dtype | None
) -> _SquaredNorms:
    """Return the squared norm of the sum of the parts, for each sample."""
    factors = [part for part in parts if isinstance(part, Factors)]
    if len(factors) == len(parts) and _products_are_less(factors, variable.numel()):
        return _squares_of_products([_cast(part, dtype) for part in factors])
    return _SquaredNorms(norms_of_rows(grads_of(parts, variable)).square_())


def _cast(part: Factors, dtype: torch.dtype | None) -> Factors:
    """Return factors in a dtype, if it is given; positions stay integers."""
    left, right = part.left, part.right.to(dtype or part.right.dtype)
    return Factors(left if left.dim() == 2 else left.to(dtype or left.dtype), right)


def _products_are_less(factors: list[Factors], size: int) -> bool:
    """Return whether products of rows are less arithmetic than gradients, or far less memory."""
    count, width = sum(part.right.shape[1] for part in factors), factors[0].right.shape[2]
    return count * (size // width + width) <= size or 8 * count * count <= size


def _squares_of_products(factors: list[Factors]) -> _SquaredNorms:
    """Return the squared norms of sums of products: `<left left^T, right right^T>`."""
    if len(factors) == 1 and factors[0].right.shape[1] == 1:
        left, right = factors[0]
        squares = norms_of_rows(right).square_()
        if left.dim() == 3:
            squares = squares * norms_of_rows(left).square_()
        return _SquaredNorms(squares)
    # A variable of several uses has the cross terms of each two of them.
    total = summed = torch.zeros_like(factors[0].right[:, 0, 0])
    for i, (left, right) in enumerate(factors):
        for other_left, other_right in factors[i:]:
            lefts, rights = _products(left, other_left), right @ other_right.mT
            terms = lefts * rights
            if other_left is left:
                total = total + terms.sum((1, 2))
                squares = terms.diagonal(dim1=1, dim2=2)
                summed = summed + squares.clamp(min=0).sqrt().sum(1)
            else:
                total = total + 2 * terms.sum((1, 2))
    return _SquaredNorms(total.clamp_(min=0), summed.square())


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of rows `[B, T, p]` and `[B, U, p]`, either as positions."""
    if left.dim() == 3 and right.dim() == 3:
        return left @ right.mT
    if left.dim() == 2 and right.dim() == 2:
        return left.unsqueeze(2) == right.unsqueeze(1)
    if left.dim() == 2:
        return _products(right, left).mT
    return left.gather(2, right.unsqueeze(1).expand(-1, left.shape[1], -1))
